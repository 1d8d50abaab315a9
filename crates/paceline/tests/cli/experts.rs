//! Experts whose buffers overflow: the run goes on, over every transport, saved or not.

use super::support::{Folder, Ran};
use serde_json::Value;
use std::fs;

/// Four experts on two ranks, one for every token, and nothing that evens their load.
const UNEVEN: &str = "kind = \"moe\"\nlayers = 2\nd_model = 32\nheads = 4\nkv_heads = 4\nffn = 16\nexperts = 4\n\
                      topk = 1\nbalance = 0.0\nseq = 64\nvocab = 256\ntied = false\n\
                      rope_theta = 10000.0\nnorm_eps = 1e-5\n";

/// Overflows in the first iteration with buffers of 1.3 equal shares, and again later.
const TRAIN: &str =
    "train --model uneven.toml --dp 2 --ep 2 --global-batch 4 --lr 0.02 --iterations 12 --json";

fn losses(ran: &Ran) -> Vec<String> {
    let objects = ran.objects();
    let iterations = objects.iter().filter(|object| object["event"] == "iteration");
    iterations.map(|object| object["loss_bits"].as_str().unwrap().to_owned()).collect()
}

fn overflows(ran: &Ran) -> Vec<Value> {
    let objects = ran.objects().into_iter();
    objects.filter(|object| object["event"] == "expert_buffers").collect()
}

#[test]
fn a_run_whose_experts_overflow_goes_on_over_every_transport() {
    let here = Folder::new();
    here.file("uneven.toml", UNEVEN);
    let large =
        here.run(&format!("{TRAIN} --expert-buffer-factor 2 --transport thread --out large"));
    let expected = losses(&large.done());
    assert_eq!(expected.len(), 12);
    for (transport, save) in [
        ("thread", ""),
        ("shm", "--save-every 0"),
        ("tcp", "--save-every 5"),
        ("thread", "--save-every 0"),
    ] {
        let out = format!("{transport}{}", save.len());
        let line = format!(
            "{TRAIN} --expert-buffer-factor 1.3 --transport {transport} {save} --out {out}"
        );
        let ran = here.run(&line).done();
        assert_eq!(losses(&ran), expected, "{line}\n{}", ran.err);
        let events = overflows(&ran);
        let [first, second] = &events[..] else { panic!("{line}: {events:?}") };
        assert!(first["iteration"] == 0 && second["iteration"].as_u64() > Some(1), "{events:?}");
        for event in &events {
            let [needed, factor] = ["needed", "factor"].map(|name| event[name].as_f64().unwrap());
            assert!(1.3 < needed && needed <= factor && factor <= 2.0, "{event}");
        }
        assert!(ran.err.contains("their buffers grow from 1.3 to"), "{}", ran.err);
        let run = here.path().join(&out);
        let read = |name: &str| fs::read_to_string(run.join(name)).unwrap();
        let record: Value = serde_json::from_str(&read("run.json")).unwrap();
        assert_eq!(record["iterations"].as_array().unwrap().len(), 12, "{line}");
        assert_eq!(record["iterations_before"], 0, "{line}");
        assert_eq!(record["strategy"]["expert_buffer_factor"], events.last().unwrap()["factor"]);
        assert_eq!(record["restarts"].as_array().unwrap().len(), events.len(), "{line}");
        assert!(!run.join(".expert-buffers").exists() && !run.join("expert-buffers.json").exists());
        assert_eq!(run.join("checkpoints").exists(), save != "--save-every 0", "{line}");
        // A run that is resumed has the size that was enough.
        let settings = read("run.toml");
        let factor = events.last().unwrap()["factor"].as_f64().unwrap();
        assert!(
            settings.parse::<toml::Table>().unwrap()["expert-buffer-factor"].as_float()
                == Some(factor)
        );
    }
    let more = here.run("train --resume shm14 --iterations 13 --json");
    assert_eq!(more.code, Some(0), "started anew, as it was not saved: {}", more.err);
    let rest = here.run("train --resume tcp14 --iterations 13 --json").done();
    assert_eq!((losses(&rest).len(), overflows(&rest).len()), (1, 0));
}

/// A plan tells what it can come to, and a study of runs is not ended either.
#[test]
fn a_plan_tells_the_peak_that_uneven_routing_can_bring() {
    let here = Folder::new();
    here.file("uneven.toml", UNEVEN);
    let plan = "plan --model uneven.toml --dp 2 --ep 2 --global-batch 4 --dtype f32";
    let peak = |factor: u32| {
        let line = format!("{plan} --expert-buffer-factor {factor} --json");
        here.run(&line).done().objects().remove(0)
    };
    let (small, large) = (peak(1), peak(2));
    assert_eq!(small["peak_bytes_at_most"], large["peak_bytes"]);
    assert!(small["peak_bytes"].as_u64() < large["peak_bytes"].as_u64());
    assert!(large.get("peak_bytes_at_most").is_none(), "nothing can overflow");
    let text = here.run(plan).done().out;
    assert!(
        text.contains("experts   buffers of 1 equal share of the tokens; uneven routing: up to 2"),
        "{text}"
    );
    let simulate = plan.replace("plan", "simulate") + " --cluster laptop";
    let simulated = here.run(&simulate).done().out;
    assert!(simulated.contains("uneven routing: up to 2, peak"), "{simulated}");
    let simulated = here.run(&format!("{simulate} --json")).done().objects().remove(0);
    assert!(simulated["peak_bytes_at_most"].is_u64(), "{simulated}");
    let study = "train --model uneven.toml --dp 2 --ep 2 --global-batch 4 --iterations 3 --expert-buffer-factor 1 \
                 --vary seed=1,2 --json";
    assert_eq!(here.run(study).done().objects().len(), 2);
}
