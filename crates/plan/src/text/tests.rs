//! Round trips of plans, valid or not, and texts that are not plans.

mod draw;

use super::*;
use crate::collective::SummationOrder;
use crate::dtype::DType;
use crate::ids::LaneId;
use crate::program::{Op, Plan, Section, StepPhase};
use crate::strategy::{Strategy, Sync, Zero};
use draw::Draw;
use proptest::prelude::*;

fn lowered(strategy: &Strategy) -> Plan {
    let model = crate::model::built_in::get("mini").unwrap().unwrap();
    crate::lower::lower(&model, strategy).unwrap()
}

fn small() -> Strategy {
    Strategy { global_batch: 2, seq: 16, ..Strategy::default() }
}

#[test]
fn lowered_plans_read_back_as_themselves() {
    let pipeline = Strategy { pp: 2, tp: 2, sp: true, dtype: DType::Bf16, ..small() };
    let served = Strategy { dp: 2, sync: Sync::Servers(2), leaves: 2, ..small() };
    let zero = Strategy {
        dp: 2,
        zero: Zero::Parameters,
        order: SummationOrder::Free,
        leaves: 2,
        ..small()
    };
    for strategy in [small(), pipeline, served, zero] {
        let plan = lowered(&strategy);
        let text = print(&plan);
        let back = parse(&text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(back, plan);
        assert_eq!(print(&back), text);
    }
}

#[test]
fn lines_are_what_the_documentation_says() {
    let text = print(&lowered(&Strategy { pp: 2, ..small() }));
    for line in [
        "[program 1 \"",
        "\nlanes \"compute\" \"",
        " recv mb1 stage0 ch0 b",
        " @compute 3F0 s0 fresh after 0",
        " @compute free mb1 frame0",
        " send mb1 stage0 ch1 b",
    ] {
        assert!(text.contains(line), "no line has {line:?}:\n{text}");
    }
}

#[test]
fn errors_name_the_line_and_what_is_right() {
    let plan = lowered(&small());
    let text = print(&plan);
    let change = |from: &str, to: &str| {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        let error = parse(&changed).unwrap_err();
        let line = changed.lines().zip(text.lines()).position(|(a, b)| a != b).unwrap() + 1;
        assert_eq!(error.line, line, "{error}");
        error.message
    };
    assert_eq!(change("dtype f32", "dtype f33").split(':').next(), Some("dtype cannot be 'f33'"));
    assert_eq!(change("\ntp 1", "\ntpp 1"), "'tp' is missing before 'tpp'");
    assert_eq!(change("b1 ", "b2 "), "expected buffer 1, found 2");
    assert_eq!(
        change(" @load ", " @lode "),
        format!("there is no lane 'lode'; the lanes are {}", plan.programs[0].lanes.join(", "))
    );
    assert_eq!(change(" 0F0 s0", " 1F0 s0"), "segment 0 is '0F', not '1F'");
    assert_eq!(change(" load tokens", " lode tokens"), "there is no op 'lode'");
    let error = parse(text.split("[mesh]").next().unwrap()).unwrap_err();
    assert_eq!(error.message, "expected '[mesh]', found the end of the text");
    assert_eq!(parse("").unwrap_err().line, 1);
    assert_eq!(parse(&format!("{text}\nmore")).unwrap_err().line, text.lines().count() + 2);
}

#[test]
fn comments_blank_lines_and_indentation_mean_nothing() {
    let plan = lowered(&small());
    let loose: String =
        print(&plan).lines().map(|line| format!("\t {line}  \r\n\n  # a remark\n")).collect();
    assert_eq!(parse(&loose), Ok(plan));
}

#[test]
fn an_op_cannot_wait_for_too_many() {
    let mut plan = Draw(1).plan();
    plan.programs = vec![Draw(2).program()];
    let program = &mut plan.programs[0];
    (program.prologue, program.epilogue) = (Section::default(), Section::default());
    program.body = Section::default();
    program.body.push(LaneId(0), Op::Step { bucket: 0, phase: StepPhase::Apply }, &[]);
    let text = print(&plan);
    let waits =
        |n: usize| text.replace(" step bucket0", &format!(" step bucket0 after{}", " 0".repeat(n)));
    assert!(parse(&waits(65535)).is_ok());
    assert!(parse(&waits(65536)).unwrap_err().message.contains("65535"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_plan_reads_back_as_itself(seed in any::<u64>()) {
        let plan = Draw(seed).plan();
        let text = print(&plan);
        match parse(&text) {
            Ok(back) => prop_assert_eq!(back, plan),
            Err(error) => {
                let line = text.lines().nth(error.line - 1);
                prop_assert!(false, "{} in {:?}", error, line);
            }
        }
    }

    #[test]
    fn no_text_is_too_odd(text in any::<String>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(parse(&text).is_err());
        prop_assert!(parse(&String::from_utf8_lossy(&bytes)).is_err());
        let headed = format!("{}\nmodel {text}", print::HEADER);
        prop_assert!(parse(&headed).is_err());
    }

    #[test]
    fn a_damaged_plan_is_an_error_or_another_plan(
        seed in any::<u64>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..4),
    ) {
        let mut bytes = print(&Draw(seed).plan()).into_bytes();
        for (at, byte, how) in damage {
            // Truncated to one byte and that byte removed: nothing is left to damage.
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => { bytes.remove(at); }
                2 => bytes.insert(at, byte),
                _ => bytes.truncate(at.max(1)),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match parse(&text) {
            Ok(plan) => prop_assert_eq!(parse(&print(&plan)), Ok(plan)),
            Err(error) => prop_assert!((1..=text.lines().count().max(1)).contains(&error.line)),
        }
    }
}
