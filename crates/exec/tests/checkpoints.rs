//! A run that is saved and resumed elsewhere equals an uninterrupted run.

use crate::common::*;
use paceline_exec::checkpoint::{Checkpoint, RankState, SaveOptions};
use paceline_exec::{ExecError, Outcome, Start, TrainOptions, train, warm_up};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::compress::Compression;
use paceline_plan::model::Model;
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::strategy::{OptimizerKind, Strategy, Sync, Zero};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Directory that is deleted at the end of its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("paceline-checkpoints-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    /// File names in the directory, including hidden ones.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn saving(folder: &Path, every: Option<u32>) -> Option<SaveOptions> {
    let directory = folder.to_owned();
    Some(SaveOptions { directory, every, keep: 2, attempt: 7, extra_files: Vec::new() })
}

fn resumed(folder: &Path) -> Start {
    Start::Checkpoint(Arc::new(Checkpoint::open(folder).unwrap_or_else(|e| panic!("{e}"))))
}

fn run_with(model: &Model, strategy: &Strategy, options: &TrainOptions) -> Outcome {
    let run = train(&plan(model, strategy), options, &mut |_| {});
    run.unwrap_or_else(|error| panic!("{strategy:?}: {error}"))
}

fn one() -> Strategy {
    strategy(8, 1, 4)
}

/// Rank state: error feedback and factors of compression, outer velocities, and moments of local
/// SGD replicas. Under the same layout the resumed run equals the uninterrupted one; under another
/// it continues without this state.
#[test]
fn what_ranks_carry_by_themselves_goes_on_under_the_same_layout() {
    let base = Strategy { dp: 2, order: SummationOrder::Free, ..strategy(8, 1, 8) };
    let lossy =
        |compress| Strategy { compress, optimizer: OptimizerKind::Momentum, ..base.clone() };
    // One has completed its warm-up where it stops, one has not.
    let first_moments = |warm_up| {
        let compress = Compression::OneBit;
        Strategy { compress, compress_warmup: Some(warm_up), ..base.clone() }
    };
    let apart = |outer| Strategy { local: Some(LocalSgd { steps: 2, outer }), ..base.clone() };
    let layouts = [
        lossy(Compression::Int8),
        // Explicit, because the default, a fifth of the run, differs between the lengths.
        Strategy { compress_warmup: Some(2), ..lossy(Compression::OneBit) },
        lossy(Compression::TopK(0.1)),
        Strategy { pp: 2, ..lossy(Compression::PowerSgd(2)) },
        first_moments(3),
        first_moments(8),
        apart(OuterOptimizer::Nesterov),
        apart(OuterOptimizer::Average),
        Strategy { compress: Compression::TopK(0.1), ..apart(OuterOptimizer::Nesterov) },
    ];
    let model = tiny_gpt(true);
    for (number, layout) in layouts.iter().enumerate() {
        let folder = Folder::new(&format!("carried-{number}"));
        let whole = run_with(&model, layout, &options(12));
        let save = saving(&folder.0, Some(3));
        run_with(&model, layout, &TrainOptions { save, ..options(6) });
        let on = TrainOptions { start: resumed(&folder.0), ..options(12) };
        let found = run_with(&model, layout, &on);
        let told = format!("{} {:?}", layout.compress, layout.local);
        assert_eq!(bits(&found), bits(&whole)[6..], "{told}");
        assert_eq!(found.parameters, whole.parameters, "{told}");

        let checkpoint = Checkpoint::open(&folder.0).unwrap();
        let carries = |layout: &Strategy| checkpoint.rank_state(&plan(&model, layout)).unwrap();
        let wider = Strategy { dp: 4, ..layout.clone() };
        assert_eq!(carries(layout), RankState::Restored, "{told}");
        assert_eq!(carries(&wider), RankState::Reset, "{told}");
        assert_eq!(carries(&one()), RankState::None, "{told}");
        let found = run_with(&model, &wider, &on);
        for (f, w) in found.iterations.iter().zip(&whole.iterations[6..]) {
            assert!((f.loss - w.loss).abs() < 0.05 * w.loss, "{told}: {} {}", f.loss, w.loss);
        }
    }
}

/// The default warm-up is a fifth of the run. A completed one stays completed, even if the run
/// becomes longer, and iterations without compression count as warm-up.
#[test]
fn a_run_does_not_warm_up_anew() {
    let model = tiny_gpt(true);
    let dense = Strategy { dp: 2, order: SummationOrder::Free, ..strategy(8, 1, 8) };
    let layout = Strategy { compress: Compression::OneBit, ..dense.clone() };
    let state = |folder: &Folder| Checkpoint::open(&folder.0).unwrap().state().clone();
    let asked_of = |layout: &Strategy, said, iterations, state| {
        let asked = Strategy { compress_warmup: said, ..layout.clone() };
        warm_up(&asked, iterations, Some(state)).map_err(|error| error.to_string())
    };
    let warm_up = |said, iterations, state| asked_of(&layout, said, iterations, state);

    let folder = Folder::new("settled");
    let save = saving(&folder.0, Some(6));
    let whole = run_with(&model, &layout, &TrainOptions { save, ..options(10) });
    fs::remove_dir_all(folder.0.join("iteration-00000010")).unwrap();
    let on = TrainOptions { start: resumed(&folder.0), ..options(10) };
    let found = run_with(&model, &layout, &on);
    assert_eq!(bits(&found), bits(&whole)[6..]);
    assert_eq!(found.parameters, whole.parameters);
    let settled = state(&folder);
    assert_eq!((settled.iteration, settled.compress_warmup_done), (6, Some(2)));
    assert_eq!(warm_up(None, 1000, &settled), Ok(2));
    assert_eq!(warm_up(Some(2), 1000, &settled), Ok(2));
    let refused = warm_up(Some(20), 1000, &settled).unwrap_err();
    assert!(refused.contains("of 2 iterations, not 20; use 2"), "{refused}");

    // Velocities do not depend on the warm-up's length, so another length may be requested.
    let momentum = Strategy { optimizer: OptimizerKind::Momentum, ..layout.clone() };
    let folder = Folder::new("velocities");
    let save = saving(&folder.0, None);
    run_with(&model, &momentum, &TrainOptions { save, ..options(10) });
    let over = state(&folder);
    assert_eq!((over.iteration, over.compress_warmup_done), (10, Some(2)));
    let lengths = [None, Some(20)].map(|said| asked_of(&momentum, said, 1000, &over));
    assert_eq!(lengths, [Ok(2), Ok(20)]);

    let folder = Folder::new("unsettled");
    let save = saving(&folder.0, None);
    run_with(&model, &dense, &TrainOptions { save, ..options(6) });
    let unsettled = state(&folder);
    assert_eq!(unsettled.compress_warmup_done, None);
    assert_eq!([10, 1000].map(|run| warm_up(None, run, &unsettled)), [Ok(6), Ok(200)]);
    let on = TrainOptions { start: resumed(&folder.0), ..options(10) };
    for (f, w) in run_with(&model, &layout, &on).iterations.iter().zip(&whole.iterations[6..]) {
        assert!((f.loss - w.loss).abs() < 0.05 * w.loss, "{} {}", f.loss, w.loss);
    }
}

/// Every layout can save and every layout can resume: bitwise equal to an uninterrupted run.
#[test]
fn a_run_goes_on_bitwise_under_any_layout() {
    let layouts = [
        ("one rank", one()),
        ("dp 2", Strategy { dp: 2, ..one() }),
        ("pp 2", Strategy { pp: 2, ..one() }),
        ("dp 2, zero 1", Strategy { dp: 2, zero: Zero::Optimizer, ..one() }),
        ("dp 4, zero 3", Strategy { dp: 4, zero: Zero::Parameters, ..one() }),
        ("dp 2, pp 2, zero 3", Strategy { dp: 2, pp: 2, zero: Zero::Parameters, ..one() }),
        ("dp 2, two servers", Strategy { dp: 2, sync: Sync::Servers(2), ..one() }),
    ];
    for model in [tiny_gpt(true), tiny_llama()] {
        let whole = run_with(&model, &one(), &options(20));
        for (saved_by, saver) in &layouts {
            let folder = Folder::new(&format!("any-{}-{saved_by}", model.name()));
            let save = saving(&folder.0, None);
            let first = run_with(&model, saver, &TrainOptions { save, ..options(10) });
            assert_eq!(bits(&first), bits(&whole)[..10], "{saved_by}");
            assert_eq!(folder.names(), ["iteration-00000010"], "{saved_by}");
            for (resumed_by, strategy) in &layouts {
                let start = resumed(&folder.0);
                let rest = run_with(&model, strategy, &TrainOptions { start, ..options(20) });
                assert_eq!(rest.iterations[0].iteration, 11);
                assert_eq!(bits(&rest), bits(&whole)[10..], "{saved_by}, then {resumed_by}");
                assert_eq!(rest.parameters, whole.parameters, "{saved_by}, then {resumed_by}");
            }
        }
    }
}

/// 16-bit weights are saved as the single-precision master copy, together with the loss scale.
#[test]
fn sixteen_bit_runs_go_on_bitwise() {
    let model = tiny_gpt(true);
    for dtype in [DType::Bf16, DType::F16] {
        let one = Strategy { dtype, ..one() };
        let cut = Strategy { dp: 2, zero: Zero::Parameters, ..one.clone() };
        let whole = run_with(&model, &one, &options(12));
        let folder = Folder::new(&format!("sixteen-{dtype}"));
        let save = saving(&folder.0, None);
        run_with(&model, &cut, &TrainOptions { save, ..options(6) });
        let scale = Checkpoint::open(&folder.0).unwrap().state().loss_scale;
        assert_eq!(scale.is_some(), dtype == DType::F16);
        let start = resumed(&folder.0);
        let rest = run_with(&model, &one, &TrainOptions { start, ..options(12) });
        assert_eq!(bits(&rest), bits(&whole)[6..], "{dtype}");
    }
}

#[test]
fn tensor_parallel_runs_go_on_close() {
    // A vocabulary of 41 does not divide by 2: the table's last rows are padding and not saved.
    let model = gpt_of(41, true);
    let cut = Strategy { tp: 2, ..one() };
    let whole = run_with(&model, &one(), &options(20));
    let cases = [("tp 2 saves", &cut, one()), ("tp 2 goes on", &one(), cut.clone())];
    for (name, saver, strategy) in cases {
        let folder = Folder::new(name);
        let save = saving(&folder.0, None);
        run_with(&model, saver, &TrainOptions { save, ..options(10) });
        let start = resumed(&folder.0);
        let rest = run_with(&model, &strategy, &TrainOptions { start, ..options(20) });
        for (found, expected) in rest.iterations.iter().zip(&whole.iterations[10..]) {
            let error = (found.loss - expected.loss).abs() / expected.loss;
            assert!(error < 1e-4, "{name}, iteration {}: {error}", found.iteration);
        }
    }
    // Under the same layout the result is bitwise identical.
    let whole = run_with(&model, &cut, &options(20));
    let folder = Folder::new("tp 2 twice");
    run_with(&model, &cut, &TrainOptions { save: saving(&folder.0, None), ..options(10) });
    let start = resumed(&folder.0);
    let rest = run_with(&model, &cut, &TrainOptions { start, ..options(20) });
    assert_eq!(bits(&rest), bits(&whole)[10..]);
}

/// Experts are saved whole, whatever ranks hold them.
#[test]
fn runs_with_experts_go_on_close() {
    let model = tiny_moe();
    let dealt = Strategy { dp: 4, ep: 2, etp: 2, zero: Zero::Optimizer, ..one() };
    let cut = Strategy { dp: 2, tp: 2, sp: true, ep: 4, zero: Zero::Optimizer, ..one() };
    let whole = run_with(&model, &one(), &options(12));
    let cases = [
        ("ep 2 and etp 2 save", &dealt, one()),
        ("ep 4 goes on", &one(), cut.clone()),
        ("ep 4 goes on from ep 2", &dealt, cut.clone()),
    ];
    for (name, saver, strategy) in cases {
        let folder = Folder::new(name);
        let save = saving(&folder.0, None);
        run_with(&model, saver, &TrainOptions { save, ..options(6) });
        let start = resumed(&folder.0);
        let rest = run_with(&model, &strategy, &TrainOptions { start, ..options(12) });
        for (found, expected) in rest.iterations.iter().zip(&whole.iterations[6..]) {
            let error = (found.loss - expected.loss).abs() / expected.loss;
            assert!(error < 1e-4, "{name}, iteration {}: {error}", found.iteration);
        }
    }
}

#[test]
fn a_larger_batch_goes_on_with_the_next_sample() {
    let model = tiny_gpt(true);
    let folder = Folder::new("batch");
    run_with(&model, &one(), &TrainOptions { save: saving(&folder.0, None), ..options(4) });
    let state = Checkpoint::open(&folder.0).unwrap().state().clone();
    assert_eq!((state.iteration, state.data.samples, state.seed), (4, 32, 7));
    let start = resumed(&folder.0);
    let save = saving(&folder.0, None);
    let wide = strategy(16, 1, 4);
    run_with(&model, &wide, &TrainOptions { start, save, ..options(6) });
    assert_eq!(Checkpoint::open(&folder.0).unwrap().state().data.samples, 64);
}

/// Saving during training neither changes it nor retains more checkpoints than requested.
#[test]
fn checkpoints_are_written_while_training_goes_on() {
    let model = tiny_gpt(true);
    let strategy = Strategy { dp: 2, ..one() };
    let expected = run_with(&model, &strategy, &options(7));
    let folder = Folder::new("every");
    let save = saving(&folder.0, Some(1));
    let outcome = run_with(&model, &strategy, &TrainOptions { save, ..options(7) });
    assert_eq!(bits(&outcome), bits(&expected));
    assert_eq!(folder.names(), ["iteration-00000006", "iteration-00000007"]);
    // Two replicas share the writing of weights and two moments.
    let state = 12 * plan(&model, &strategy).parameters;
    let copies: u64 = outcome.copy_bytes.iter().sum();
    assert_eq!(copies, state, "{:?}", outcome.copy_bytes);
    assert!(outcome.copy_bytes.iter().all(|&bytes| bytes > state / 4));
    let start = Start::Checkpoint(Arc::new(
        Checkpoint::open(&folder.0.join("iteration-00000006")).unwrap(),
    ));
    let rest = run_with(&model, &one(), &TrainOptions { start, ..options(7) });
    assert_eq!(bits(&rest), bits(&expected)[6..]);
}

#[test]
fn what_a_dead_run_left_unfinished_is_ignored_and_removed() {
    let model = tiny_mlp();
    let folder = Folder::new("dead");
    let save = || saving(&folder.0, None);
    run_with(&model, &one(), &TrainOptions { save: save(), ..options(2) });
    // State left by a run that is killed while it writes.
    let dead = folder.0.join(".iteration-00000003.00000000000000ff.partial");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("model.safetensors"), [0; 100]).unwrap();
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    assert_eq!(checkpoint.state().iteration, 2);
    let start = Start::Checkpoint(Arc::new(checkpoint));
    run_with(&model, &one(), &TrainOptions { start, save: save(), ..options(4) });
    assert_eq!(folder.names(), ["iteration-00000002", "iteration-00000004"]);
}

#[test]
fn an_unreadable_checkpoint_is_named_with_its_tensor() {
    let model = tiny_gpt(true);
    let folder = Folder::new("broken");
    run_with(&model, &one(), &TrainOptions { save: saving(&folder.0, None), ..options(1) });
    let inside = folder.0.join("iteration-00000001");
    let weights = inside.join("model.safetensors");
    let sound = fs::read(&weights).unwrap();
    let told = |model: &Model| match Checkpoint::open(&folder.0) {
        Err(error) => error.to_string(),
        Ok(checkpoint) => {
            let start = Start::Checkpoint(Arc::new(checkpoint));
            let options = TrainOptions { start, ..options(2) };
            let run = train(&plan(model, &one()), &options, &mut |_| panic!("nothing may run"));
            run.unwrap_err().to_string()
        }
    };
    let other = told(&gpt_of(48, true));
    let expected = "tensor 'embedding.table.weight' has shape [40, 16], the model needs [48, 16]";
    assert!(other.ends_with(expected), "{other}");
    let other = told(&tiny_gpt(false));
    assert!(other.contains("tensor 'head.table.weight' is missing"), "{other}");

    fs::write(&weights, &sound[..sound.len() - 5]).unwrap();
    let cut = told(&model);
    assert!(cut.contains("model.safetensors: tensor '") && cut.contains("cut short"), "{cut}");
    fs::write(&weights, &sound[..100]).unwrap();
    assert!(told(&model).contains("cut short"));
    fs::write(&weights, &sound).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&weights).unwrap();
    file.write_all_at(&u64::MAX.to_le_bytes(), 0).unwrap();
    assert!(told(&model).contains("announces a header of 18446744073709551615 bytes"));
    fs::write(&weights, &sound).unwrap();

    fs::remove_file(inside.join("optimizer.safetensors")).unwrap();
    assert!(told(&model).contains("optimizer.safetensors: No such file"));
    fs::write(inside.join("training.json"), r#"{"format": 9}"#).unwrap();
    assert!(told(&model).contains("training.json: written in layout 9"));
    fs::write(inside.join("training.json"), "{").unwrap();
    assert!(told(&model).contains("training.json: is not a training state"));
    fs::remove_file(inside.join("training.json")).unwrap();
    assert!(told(&model).contains("no complete checkpoint here"));
}

#[test]
fn moments_of_another_optimizer_are_refused() {
    let folder = Folder::new("optimizer");
    let sgd = Strategy { optimizer: OptimizerKind::Sgd, ..one() };
    run_with(&tiny_mlp(), &sgd, &TrainOptions { save: saving(&folder.0, None), ..options(1) });
    assert!(!folder.0.join("iteration-00000001/optimizer.safetensors").exists());
    let start = resumed(&folder.0);
    let options = TrainOptions { start, ..options(2) };
    let error = train(&plan(&tiny_mlp(), &one()), &options, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ExecError::Option { option: "--optimizer", .. }), "{error}");
}

/// The state of every rank must be on disk before a checkpoint gets its name.
#[test]
fn a_run_that_cannot_write_says_where_and_keeps_what_it_had() {
    let folder = Folder::new("refused");
    let model = tiny_mlp();
    let strategy = Strategy { dp: 2, ..one() };
    let save = saving(&folder.0, None);
    run_with(&model, &strategy, &TrainOptions { save, ..options(1) });
    // A file exists where the next checkpoint's hidden directory would be.
    let hidden = folder.0.join(format!(".iteration-00000003.{:016x}.partial", 7));
    fs::write(&hidden, b"in the way").unwrap();
    let start = resumed(&folder.0);
    let save = saving(&folder.0, Some(3));
    let options = TrainOptions { start, save, ..options(1000) };
    let error = train(&plan(&model, &strategy), &options, &mut |_| {}).unwrap_err();
    let told = error.to_string();
    assert!(
        told.contains("00000003") && told.contains("earlier checkpoints are untouched"),
        "{told}"
    );
    assert_eq!(Checkpoint::open(&folder.0).unwrap().state().iteration, 1);
}

/// File system too small for a third checkpoint beside two others.
#[test]
fn a_full_disk_ends_the_run_and_leaves_the_last_checkpoint() {
    let folder = Folder::new("full");
    fs::create_dir_all(&folder.0).unwrap();
    let mount = |arguments: &[&str]| {
        let done = Command::new(arguments[0]).args(&arguments[1..]).arg(&folder.0).output();
        done.is_ok_and(|done| done.status.success())
    };
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs"]) {
        eprintln!("SKIPPED: a full disk needs a tmpfs of its own, which only root may mount");
        return;
    }
    let strategy = Strategy { dp: 2, ..one() };
    let options = TrainOptions { save: saving(&folder.0, Some(1)), ..options(1000) };
    let run = train(&plan(&tiny_gpt(true), &strategy), &options, &mut |_| {});
    let (names, last) = (folder.names(), Checkpoint::open(&folder.0).map(|c| c.state().iteration));
    let rest = last.is_ok().then(|| {
        let options = TrainOptions { start: resumed(&folder.0), save: None, ..options.clone() };
        let options = TrainOptions { iterations: 5, ..options };
        train(&plan(&tiny_gpt(true), &one()), &options, &mut |_| {})
    });
    assert!(mount(&["umount"]));
    let told = run.unwrap_err().to_string();
    // Which file does not fit depends on the order in which ranks write.
    assert!(told.contains("No space left on device") && told.contains(".partial/"), "{told}");
    assert_eq!((names.len(), last.unwrap()), (2, 2), "{names:?}");
    assert_eq!(rest.unwrap().unwrap().iterations.len(), 3);
}

/// Every flipped bit is found, in every file, and named; the newest whole checkpoint is taken.
#[test]
fn a_flipped_byte_is_named_and_an_older_checkpoint_is_taken() {
    let folder = Folder::new("flipped");
    let model = tiny_gpt(true);
    let layout = Strategy { dp: 2, tp: 2, zero: Zero::Optimizer, ..strategy(8, 1, 4) };
    let mut save = saving(&folder.0, Some(2)).unwrap();
    save.extra_files.push(("model.toml".to_owned(), b"kind = \"gpt2\"".to_vec()));
    run_with(&model, &layout, &TrainOptions { save: Some(save), ..options(4) });
    let newest = |before| Checkpoint::newest_whole(&folder.0, before);
    let (found, skipped) = newest(u32::MAX).unwrap();
    assert_eq!((found.state().iteration, skipped.len()), (4, 0));
    let verified = found.verify().unwrap();
    let weights = found.weights().tensors().len();
    assert_eq!(verified.tensors, 3 * weights, "weights and two moments of each");
    assert_eq!(newest(4).unwrap().0.state().iteration, 2);
    let last = folder.0.join("iteration-00000004");
    for (name, from_end, named) in [
        ("model.safetensors", 3, "model.safetensors: tensor '"),
        ("model.safetensors", 1000, "model.safetensors: tensor '"),
        ("optimizer.safetensors", 77, "optimizer.safetensors: tensor '"),
        ("training.json", 200, "training.json"),
        ("model.toml", 2, "model.toml: is damaged"),
        ("checksums.json", 20, "checksums.json"),
    ] {
        let path = last.join(name);
        let sound = fs::read(&path).unwrap();
        let mut flipped = sound.clone();
        let at = sound.len() - from_end;
        flipped[at] ^= 4;
        fs::write(&path, &flipped).unwrap();
        let (found, skipped) = newest(u32::MAX).unwrap();
        assert_eq!(found.state().iteration, 2, "{name}");
        let told = skipped[0].problem.to_string();
        assert!(told.contains(named) || name == "checksums.json", "{name}: {told}");
        let told = Checkpoint::newest_whole(&last, u32::MAX).unwrap_err().to_string();
        assert!(told.contains(named) || name == "checksums.json", "{name}: {told}");
        fs::write(&path, &sound).unwrap();
    }
    newest(u32::MAX).unwrap().0.verify().unwrap();
    for iteration in [2, 4] {
        fs::remove_file(folder.0.join(format!("iteration-0000000{iteration}/checksums.json")))
            .unwrap();
    }
    let told = newest(u32::MAX).unwrap_err().to_string();
    assert!(told.contains("none of 2 checkpoints is whole; the newest: "), "{told}");
}
