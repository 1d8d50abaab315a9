//! Rows of Table 1 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
//! Clusters Using Megatron-LM" (SC'21, arXiv 2104.04473), on up to 315 DGX A100 hosts.
//!
//! The table prints TFLOP/s per GPU; the times here follow from it by the paper's eq. 3.
//! Microbatches, chunks and the kind of data parallelism are those of the authors' scripts
//! (`run_table_1.sh`). Device, fabric and software each have one description for all rows; nothing
//! is specific to a row.

use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::lower::lower_on;
use paceline_plan::model::built_in;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Split, Strategy};
use paceline_sim::cluster::preset;
use paceline_sim::{Options, Profile, simulate};

struct Row {
    model: &'static str,
    tp: u32,
    pp: u32,
    chunks: u16,
    dp: u32,
    micro_batch: u64,
    global_batch: u64,
    /// PyTorch's data parallelism overlaps gradient reduction; Megatron's own did not.
    overlap: bool,
    measured_s: f64,
}

const ROWS: [Row; 5] = [
    Row {
        model: "gpt-1.7b",
        tp: 1,
        pp: 1,
        chunks: 1,
        dp: 32,
        micro_batch: 16,
        global_batch: 512,
        overlap: true,
        measured_s: 3.528,
    },
    Row {
        model: "gpt-7.5b",
        tp: 4,
        pp: 1,
        chunks: 1,
        dp: 32,
        micro_batch: 16,
        global_batch: 512,
        overlap: true,
        measured_s: 3.6963,
    },
    Row {
        model: "gpt-39b",
        tp: 8,
        pp: 2,
        chunks: 1,
        dp: 32,
        micro_batch: 4,
        global_batch: 1536,
        overlap: false,
        measured_s: 14.453,
    },
    Row {
        model: "gpt-145b",
        tp: 8,
        pp: 8,
        chunks: 2,
        dp: 24,
        micro_batch: 2,
        global_batch: 2304,
        overlap: false,
        measured_s: 24.817,
    },
    Row {
        model: "gpt-530b",
        tp: 8,
        pp: 35,
        chunks: 3,
        dp: 9,
        micro_batch: 1,
        global_batch: 2520,
        overlap: false,
        measured_s: 54.085,
    },
];

fn predicted_s(row: &Row) -> f64 {
    let model = built_in::get(row.model).unwrap().unwrap();
    let schedule = match row.chunks {
        1 => ScheduleKind::OneFOneB,
        chunks => ScheduleKind::Interleaved { chunks },
    };
    let strategy = Strategy {
        tp: row.tp,
        pp: row.pp,
        dp: row.dp,
        schedule,
        micro_batch: row.micro_batch,
        global_batch: row.global_batch,
        seq: model.seq,
        recompute: Recompute::FullForward,
        split: Split::Count,
        dtype: DType::F16,
        grad_dtype: DType::F16,
        order: SummationOrder::Free,
        collective: Algorithm::Ring,
        overlap: row.overlap,
        ..Strategy::default()
    };
    let world = strategy.mesh().world();
    let cluster = preset::holding("dgx-a100", world.into()).unwrap();
    let options = Options { profile: Profile::MEGATRON_2021, ..Options::default() };
    let plan = lower_on(&model, &strategy, &cluster.fabric_with(&options.profile)).unwrap();
    simulate(&plan, &cluster, &options).unwrap().iteration.0
}

#[test]
fn every_row_comes_out_within_a_quarter() {
    let mut errors = Vec::new();
    for row in &ROWS {
        let error = predicted_s(row) / row.measured_s - 1.0;
        assert!(error.abs() < 0.25, "{}: {:+.1} %", row.model, 100.0 * error);
        errors.push(error.abs());
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    assert!(mean < 0.10, "{:.1} % on average", 100.0 * mean);
}
