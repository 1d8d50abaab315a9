use super::*;
use proptest::prelude::*;

const HEADER: &str = "id,platform,gpus,layers,d_model,ffn,heads,kv_heads,seq,vocab,experts,\
    activation_gated,tied_embeddings,tp,sp,pp,vpp,dp,cp,zero_dist_optimizer,micro_batch,\
    global_batch,precision,recompute,overlap_flags,measured_iteration_s,\
    measured_tokens_per_s_per_gpu,measured_peak_mem_bytes,notes,software";

fn row(line: &str) -> Row {
    let rows = rows(&format!("{HEADER}\n{line}\n"), "runs.csv").unwrap();
    assert_eq!(rows.len(), 1);
    rows.into_iter().next().unwrap()
}

const MEGATRON: &str = "sc21,A100-SXM-80GB,512,48,8192,32768,64,64,2048,51200,,gelu/no,True,8,\
    False,2,1,32,1,none (replicated optimizer),4,1536,fp16,full (uniform),\
    DDP-impl local: grad all-reduce NOT overlapped,14.453,425.09,,Selene,megatron-lm-2021";
const LLAMA: &str = "titan,H100-96GB-HBM2e-500W,64,32,4096,14336,32,8,8192,128256,,swiglu/yes,\
    False,2,True,4,2,8,1,dist-optimizer (ZeRO-1),1,64,bf16 + float8 linears; bf16 grad reduce,\
    none,overlap-grad-reduce,,7000,60000000000,\"peak, LAST rank\",megatron-core";

#[test]
fn a_row_says_model_strategy_cluster_and_profile() {
    let Request { model, strategy, cluster, profile } = row(MEGATRON).request().unwrap();
    assert_eq!((model.kind, model.layers, model.head_dim), (ModelKind::Gpt2, 48, 128));
    assert!(model.tied && !strategy.overlap && !strategy.sp);
    assert_eq!((strategy.tp, strategy.pp, strategy.dp), (8, 2, 32));
    assert_eq!((strategy.dtype, strategy.grad_dtype), (DType::F16, DType::F16));
    assert_eq!((strategy.zero, strategy.recompute), (Zero::None, Recompute::FullForward));
    assert_eq!(strategy.split, Split::Count);
    assert_eq!(strategy.schedule, ScheduleKind::OneFOneB);
    assert_eq!((cluster.name.as_str(), profile.name), ("dgx-a100:64", "megatron-2021"));

    let Request { model, strategy, profile, .. } = row(LLAMA).request().unwrap();
    assert_eq!((model.kind, model.kv_heads, model.tied), (ModelKind::Llama, 8, false));
    assert!(strategy.overlap && strategy.sp);
    assert_eq!((strategy.dtype, strategy.grad_dtype), (DType::Fp8, DType::Bf16));
    assert_eq!(strategy.zero, Zero::Optimizer);
    assert_eq!(strategy.schedule, ScheduleKind::Interleaved { chunks: 2 });
    assert_eq!(profile, Profile::MEGATRON_CORE);
}

#[test]
fn the_profile_follows_from_the_named_software_and_flags_alone() {
    let told = |software: &str, flags: &str| {
        // A source that would betray another software, were it read.
        let header = format!("{HEADER},source,deterministic_flags");
        let line = LLAMA.replace("megatron-core", software);
        let text = format!("{header}\n{line},pytorch/torchtitan:b,{flags}\n");
        rows(&text, "runs.csv").unwrap()[0].request().map(|request| request.profile)
    };
    let name = |software: &str| told(software, "none").map(|profile| profile.name);
    assert_eq!(name("torchtitan-eager-2024"), Ok("torchtitan-eager"));
    assert_eq!(name("megatron-core"), Ok("megatron-core"));
    assert_eq!(name("megatron-bridge-26.04"), Ok("megatron-bridge"));
    assert_eq!(name("modern"), Ok("modern"));
    let why = |software: &str| name(software).unwrap_err().to_string();
    assert_eq!(why(""), "software is not stated");
    assert_eq!(name("llm-foundry-fsdp1"), Ok("llm-foundry"));
    assert_eq!(why("llm-foundry-2"), "no profile describes the software 'llm-foundry-2'");
    assert!(!told("megatron-core", "none").unwrap().tp_comm_overlap);
    let flags = "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0; attention-backend=unfused";
    assert_eq!(told("megatron-core", flags).unwrap().attention, Attention::Written);
}

#[test]
fn recomputation_and_sharding_are_what_the_software_means_by_them() {
    let strategy = |from: &str, to: &str, software: &str| {
        assert!(LLAMA.contains(from), "{from}");
        let line = LLAMA.replacen(from, to, 1).replace("megatron-core", software);
        row(&line).request().unwrap().strategy
    };
    let titan = "torchtitan-compile-2025";
    let recompute = |words: &str, source: &str| {
        strategy(",none,overlap", &format!(",{words},overlap"), source).recompute
    };
    assert_eq!(recompute("full", titan), Recompute::Full);
    assert_eq!(recompute("full", "megatron-core"), Recompute::FullForward);
    assert_eq!(recompute("full-block recompute 5 layers", "megatron-core"), Recompute::FullOf(5));
    assert_eq!(recompute("selective-op", titan), Recompute::SelectiveOp);
    assert_eq!(recompute("selective", titan), Recompute::SelectiveOp);
    assert_eq!(recompute("selective (core attention)", "megatron-core"), Recompute::Selective);
    let zero = |words: &str| strategy("dist-optimizer (ZeRO-1)", words, titan).zero;
    assert_eq!(zero("FSDP2 (ZeRO-3)"), Zero::Parameters);
    assert_eq!(zero("FSDP2 (ZeRO-2-like)"), Zero::Optimizer);
    assert_eq!(zero("ZeRO-2"), Zero::Gradients);
}

#[test]
fn megatron_pads_the_vocabulary() {
    let vocab = |software: &str| {
        let line = LLAMA.replace("128256", "50257").replace("megatron-core", software);
        row(&line).request().unwrap().model.vocab
    };
    assert_eq!(vocab("megatron-core"), 50432, "a multiple of 128 on each of two ranks");
    assert_eq!(vocab("torchtitan-compile-2025"), 50257);
}

#[test]
fn measurements_are_read_as_published() {
    assert_eq!(row(MEGATRON).measured_s(), Some(14.453));
    assert_eq!(row(MEGATRON).measured_bytes(), None);
    let from_rate = row(LLAMA).measured_s().unwrap();
    assert!((from_rate - 64.0 * 8192.0 / (7000.0 * 64.0)).abs() < 1e-12);
    assert_eq!(row(LLAMA).measured_bytes(), Some(Bytes(60_000_000_000)));
    assert_eq!((row(LLAMA).id(), row(LLAMA).line()), ("titan", 2));
}

#[test]
fn the_memory_is_that_of_the_rank_the_source_reports() {
    let of_last = row(LLAMA).simulate().unwrap();
    let of_any = row(&LLAMA.replace("megatron-core", "modern")).simulate().unwrap();
    assert!(of_last.predicted_bytes < of_any.predicted_bytes);
    assert!(of_any.predicted_s > 0.1 && of_any.predicted_s < 10.0);
}

/// Two ranks sharing a sequence do the work of two that do not, plus a KV exchange.
#[test]
fn rows_with_context_parallelism_are_simulated() {
    let apart = row(MEGATRON).simulate().unwrap();
    let cut = MEGATRON.replacen(",32,1,none", ",16,2,none", 1);
    assert_ne!(cut, MEGATRON);
    let shared = row(&cut).simulate().unwrap();
    assert!(shared.predicted_s > apart.predicted_s, "{shared:?} {apart:?}");
    assert!(shared.predicted_bytes < apart.predicted_bytes, "{shared:?} {apart:?}");
}

/// Experts on eight ranks, with and without latent attention: columns specific to such rows.
#[test]
fn rows_with_experts_are_simulated() {
    let header = format!("{HEADER},topk,attention,shared_experts,dense_layers,dense_ffn,ep,etp");
    let of = |more: &str| {
        let line = LLAMA.replacen("128256,,", "128256,64,", 1);
        assert_ne!(line, LLAMA);
        let text = format!("{header}\n{line},{more}\n");
        rows(&text, "runs.csv").unwrap().remove(0)
    };
    let plain = of("8,gqa,,,,8,1");
    let Request { model, strategy, .. } = plain.request().unwrap();
    assert_eq!((model.kind, model.experts.experts, model.experts.topk), (ModelKind::Moe, 64, 8));
    assert_eq!((strategy.ep, strategy.etp, strategy.expert_buffer_factor), (8, 1, 1.0));
    let latent = of("8,mla:q_lora=1536;kv_lora=512;qk_nope=128;qk_rope=64;v=128,1,1,4096,8,2");
    let model = latent.request().unwrap().model;
    assert_eq!((model.head_dim, model.kv_heads, model.latent.v_dim), (192, 32, 128));
    assert_eq!((model.experts.shared_experts, model.experts.dense_layers), (1, 1));
    let [plain, latent] = [plain, latent].map(|row| row.simulate().unwrap().predicted_s);
    let dense = row(LLAMA).simulate().unwrap().predicted_s;
    assert!(plain > dense && latent > 0.0, "{plain} {latent} {dense}");
    let lacking = of("8,mla:q_lora=1536,,,,8,1").request().unwrap_err().to_string();
    assert_eq!(lacking, "attention 'q_lora=1536' lacks kv_lora");
}

#[test]
fn what_cannot_be_represented_is_skipped_with_its_reason() {
    let reason = |from: &str, to: &str| {
        assert!(MEGATRON.contains(from), "{from}");
        row(&MEGATRON.replacen(from, to, 1)).simulate().unwrap_err().to_string()
    };
    assert_eq!(reason("A100-SXM-80GB", "MI250X"), "no built-in cluster describes 'MI250X'");
    assert_eq!(reason(",4,1536,", ",,1536,"), "micro_batch is not stated");
    assert_eq!(reason(",48,8192", ",many,8192"), "layers 'many' is not a number that can be used");
    assert_eq!(reason(",512,48", ",500,48"), "500 GPUs are not tp·pp·cp·dp = 512");
    assert_eq!(reason("51200,,", "51200,8,"), "topk is not stated");
    assert_eq!(reason("full (uniform)", "not stated"), "recomputation is 'not stated'");
    assert_eq!(reason(",fp16,", ",int4,"), "precision 'int4' cannot be planned");
    assert!(reason(",1536,", ",1537,").starts_with("--global-batch: 1537 samples do not divide"));
}

proptest! {
    /// With any field contents, a row is simulated or skipped.
    #[test]
    fn absurd_rows_do_not_panic(
        column in 2usize..22,
        text in prop_oneof![
            Just("0"), Just("-1"), Just("18446744073709551615"), Just("4294967295"),
            Just("NaN"), Just(""),
        ],
    ) {
        let mut fields: Vec<&str> = MEGATRON.split(',').collect();
        fields[column] = text;
        let _ = row(&fields.join(",")).simulate();
    }
}
