//! Measured collectives: one row per operation, group and size, as printed by nccl-tests.
//!
//! A row names the GPU and the number of ranks. They run on the smallest cluster of that kind that
//! has enough GPUs, in rank order. nccl-tests leaves the algorithm to the library, and so does the
//! simulation.

use super::csv::{self, Record};
use super::{Skipped, TableError, platform};
use crate::network::{Vector, of_library};
use crate::profile::Library;
use paceline_plan::collective::{
    self as native, Algorithm, CollectiveKind, Pattern, SummationOrder,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::Bytes;
use std::str::FromStr;

/// Columns that identify a table of this kind.
pub const COLUMNS: [&str; 5] = ["gpu", "gpus", "op", "size_bytes", "time_us_out_of_place"];

/// Reads the rows of a table of measured collectives.
pub fn rows(text: &str, file: &str) -> Result<Vec<Row>, TableError> {
    let records = csv::parse(text, file, &COLUMNS)?;
    Ok(records.into_iter().map(Row::new).collect())
}

/// One measured collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    record: Record,
    id: String,
}

/// Simulated result of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Time of the collective, in seconds.
    pub predicted_s: f64,
}

impl Row {
    fn new(record: Record) -> Self {
        let columns = ["gpu", "gpus", "op", "size_bytes", "source"];
        let words: Vec<&str> = columns.iter().filter_map(|column| record.get(column)).collect();
        let id = words.join(" ");
        Self { record, id }
    }

    /// Row name: the measured case, and the source if the table has one.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Line of the row in its file.
    pub fn line(&self) -> usize {
        self.record.line
    }

    /// Number of participating devices.
    pub fn devices(&self) -> Option<u32> {
        self.number("gpus").ok()
    }

    /// Size of the full vector, even if a rank contributes or keeps only a shard.
    pub fn bytes(&self) -> Option<Bytes> {
        self.number("size_bytes").ok().map(Bytes)
    }

    /// Measured time in seconds.
    ///
    /// Of nccl-tests' two times, this is the out-of-place one, which is printed first and usually
    /// compared. The in-place time is within a few per cent of it and is used if the first is
    /// missing.
    pub fn measured_s(&self) -> Option<f64> {
        let positive = |column: &str| {
            let value: f64 = self.record.get(column)?.parse().ok()?;
            (value.is_finite() && value > 0.0).then_some(value * 1e-6)
        };
        positive("time_us_out_of_place").or_else(|| positive("time_us_in_place"))
    }

    /// Simulates the collective, or returns the reason that it is not possible.
    pub fn simulate(&self) -> Result<Prediction, Skipped> {
        let skipped = |why: &dyn ToString| Skipped(why.to_string());
        let kind: CollectiveKind = self.word("op")?.parse().map_err(|why| skipped(&why))?;
        let ranks: u32 = self.number("gpus")?;
        let bytes = Bytes(self.number("size_bytes")?);
        let pattern = Pattern::new(kind, Algorithm::Auto, SummationOrder::Free, ranks, 0)
            .map_err(|why| skipped(&why))?;
        let gpu = self.word("gpu")?;
        // Tables name only the GPU; those with NVLink are the SXM modules.
        let cluster = platform::cluster(gpu, ranks.into())
            .or_else(|_| platform::cluster(&format!("{gpu}-SXM"), ranks.into()))
            .map_err(|_| Skipped(format!("no built-in cluster describes '{gpu}'")))?;
        let members: Vec<Rank> = (0..ranks).map(Rank).collect();
        let time = of_library(Library::Nccl, &cluster)
            .native((native::Library::Nccl, None), &pattern, &members, &Vector::of_bytes(bytes))
            .map_err(|why| skipped(&why))?;
        Ok(Prediction { predicted_s: time.0 })
    }

    fn word(&self, column: &str) -> Result<&str, Skipped> {
        self.record.get(column).ok_or_else(|| Skipped(format!("{column} is not stated")))
    }

    fn number<T: FromStr>(&self, column: &str) -> Result<T, Skipped> {
        let text = self.word(column)?;
        text.parse()
            .map_err(|_| Skipped(format!("{column} '{text}' is not a number that can be used")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: &str = "source,gpu,gpus,op,dtype,size_bytes,time_us_out_of_place,\
        busbw_GBps_out_of_place,time_us_in_place,busbw_GBps_in_place";
    const LINE: &str = "vTrain,A100,8,all_reduce,float,1048576,92.79,19.78,92.15,19.91";

    fn row(line: &str) -> Row {
        let rows = rows(&format!("{HEADER}\n{line}\n"), "nccl.csv").unwrap();
        assert_eq!(rows.len(), 1);
        rows.into_iter().next().unwrap()
    }

    #[test]
    fn a_row_says_what_was_measured_and_how_long_it_took() {
        let row = row(LINE);
        assert_eq!(row.id(), "A100 8 all_reduce 1048576 vTrain");
        assert_eq!(row.line(), 2);
        assert_eq!((row.devices(), row.bytes()), (Some(8), Some(Bytes(1 << 20))));
        assert!((row.measured_s().unwrap() - 92.79e-6).abs() < 1e-12);
        let time = row.simulate().unwrap().predicted_s;
        assert!(time > 20e-6 && time < 200e-6, "{time}");
    }

    #[test]
    fn the_time_in_place_stands_in_for_a_missing_one() {
        let time = |line: &str| row(line).measured_s().map(|s| (s * 1e8).round() as u64);
        assert_eq!(time(&LINE.replace(",92.79,", ",,")), Some(9215));
        assert_eq!(time(&LINE.replace(",92.79,", ",,").replace(",92.15,", ",-1,")), None);
    }

    #[test]
    fn groups_may_span_hosts_and_do_other_things() {
        let time = |line: &str| row(line).simulate().unwrap().predicted_s;
        let inside = time(&LINE.replace("1048576", "1073741824"));
        let across = time(&LINE.replace("A100,8", "A100,16").replace("1048576", "1073741824"));
        assert!(across > inside);
        assert!(time(&LINE.replace("all_reduce", "all_gather")) < time(LINE));
        assert!(time(&LINE.replace("A100", "H100-SXM-80GB")) > 0.0);
    }

    #[test]
    fn what_cannot_be_represented_is_skipped_with_its_reason() {
        let reason = |from: &str, to: &str| {
            assert!(LINE.contains(from), "{from}");
            row(&LINE.replacen(from, to, 1)).simulate().unwrap_err().to_string()
        };
        assert_eq!(reason("A100", "MI250X"), "no built-in cluster describes 'MI250X'");
        assert_eq!(reason(",8,", ",,"), "gpus is not stated");
        assert_eq!(reason(",8,", ",eight,"), "gpus 'eight' is not a number that can be used");
        assert_eq!(reason("1048576", "1e6"), "size_bytes '1e6' is not a number that can be used");
        assert!(reason(",8,", ",0,").starts_with("all_reduce of 0 ranks"));
        assert!(reason("all_reduce", "sendrecv").contains("sendrecv"));
    }

    proptest! {
        /// With any field contents, a row is simulated or skipped.
        #[test]
        fn absurd_rows_do_not_panic(
            column in 1usize..7,
            text in prop_oneof![
                Just("0"), Just("1"), Just("-1"), Just("18446744073709551615"),
                Just("4294967295"), Just("NaN"), Just(""), Just("broadcast"), Just("all_to_all"),
            ],
        ) {
            let mut fields: Vec<&str> = LINE.split(',').collect();
            fields[column] = text;
            let row = row(&fields.join(","));
            if let Ok(prediction) = row.simulate() {
                prop_assert!(prediction.predicted_s.is_finite() && prediction.predicted_s >= 0.0);
            }
        }
    }
}
