//! Flags with named values.

use super::Problems;
use std::fmt::Display;
use std::str::FromStr;

/// Parses a named value; `None` if the flag is absent or invalid.
///
/// Case, dashes and underscores do not matter, and common names of other systems are accepted:
/// `all-reduce`, `AllReduce`, `FP32`. The error is about the text as typed.
pub(crate) fn word<T>(flag: &str, text: &Option<String>, problems: &mut Problems) -> Option<T>
where
    T: FromStr,
    T::Err: Display,
{
    let text = text.as_deref()?;
    let other = || spellings(text).into_iter().find_map(|spelling| spelling.parse().ok());
    text.parse()
        .or_else(|error: T::Err| other().ok_or(error))
        .map_err(|error| problems.add(flag, error.to_string()))
        .ok()
}

/// Names of other systems in lower case, and ours.
const SYNONYMS: [(&str, &str); 12] = [
    ("allreduce", "all-reduce"),
    ("allgather", "all-gather"),
    ("alltoall", "all-to-all"),
    ("reducescatter", "reduce-scatter"),
    ("halvingdoubling", "halving-doubling"),
    ("fp32", "f32"),
    ("float32", "f32"),
    ("fp16", "f16"),
    ("float16", "f16"),
    ("half", "f16"),
    ("bfloat16", "bf16"),
    ("float8", "fp8"),
];

/// Spellings with which a name may be known.
fn spellings(text: &str) -> [String; 3] {
    let lower = text.trim().to_lowercase();
    let joined = lower.replace(['-', '_'], "");
    let known = SYNONYMS.iter().find(|(other, _)| *other == joined);
    let name = known.map_or(lower, |(_, name)| (*name).to_owned());
    [name.replace('_', "-"), name.replace('-', "_"), name]
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::DType;
    use paceline_plan::collective::CollectiveKind;
    use paceline_plan::strategy::Sync;

    fn read<T: FromStr>(text: &str) -> Result<T, String>
    where
        T::Err: Display,
    {
        let mut problems = Problems::default();
        word("--flag", &Some(text.to_owned()), &mut problems).ok_or(problems.to_string())
    }

    #[test]
    fn spellings_of_other_systems_are_accepted() {
        for text in ["all_reduce", "all-reduce", "AllReduce", "allreduce", "ALL_REDUCE"] {
            assert_eq!(read(text), Ok(CollectiveKind::AllReduce), "{text}");
            assert_eq!(read(text), Ok(Sync::AllReduce), "{text}");
        }
        assert_eq!(read("reduce-scatter"), Ok(CollectiveKind::ReduceScatter));
        for text in ["f32", "FP32", "float32", "Float32"] {
            assert_eq!(read(text), Ok(DType::F32), "{text}");
        }
        assert_eq!(read("bfloat16"), Ok(DType::Bf16));
    }

    #[test]
    fn errors_are_about_the_text_as_typed() {
        let told = read::<CollectiveKind>("All-Reduc").unwrap_err();
        assert!(told.starts_with("error: --flag: ") && told.contains("'All-Reduc'"), "{told}");
    }
}
