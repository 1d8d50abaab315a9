use super::*;
use crate::graph::Scaling;
use crate::model::built_in;

/// The dimensions of GPT-2 small's published file, with some surrounding entries.
const GPT2: &str = r#"{
  "activation_function": "gelu_new",
  "architectures": ["GPT2LMHeadModel"],
  "attn_pdrop": 0.1,
  "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2",
  "n_ctx": 1024,
  "n_embd": 768,
  "n_head": 12,
  "n_inner": null,
  "n_layer": 12,
  "n_positions": 1024,
  "task_specific_params": { "text-generation": { "n_layer": 3, "max_length": 50 } },
  "vocab_size": 50257
}"#;

const LLAMA: &str = r#"{
  "attention_bias": false,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 8192,
  "mlp_bias": false,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": null,
  "rope_theta": 500000.0,
  "tie_word_embeddings": false,
  "vocab_size": 128256
}"#;

fn shape_of(name: &str) -> crate::model::ModelDims {
    *built_in::get(name).expect("built in").expect("sound")
}

fn sound(text: &str) -> Model {
    parse(text, "hub/tiny/config.json").unwrap_or_else(|errors| panic!("{errors}"))
}

fn told(text: &str) -> String {
    parse(text, "config.json").expect_err("the text is wrong").to_string()
}

#[test]
fn published_files_give_the_built_in_shapes() {
    let gpt2 = sound(GPT2);
    assert_eq!(*gpt2, shape_of("gpt2-124m"));
    assert_eq!(gpt2.name(), "tiny");
    assert_eq!(*sound(LLAMA), shape_of("llama3-8b"));
}

#[test]
fn silence_means_the_default_of_the_class() {
    let without = |key: &str| {
        let lines = LLAMA.lines().filter(|line| !line.contains(&format!("\"{key}\"")));
        sound(&lines.collect::<Vec<_>>().join("\n"))
    };
    assert_eq!(without("num_key_value_heads").kv_heads, 32);
    assert_eq!(without("rms_norm_eps").norm_eps, 1e-6);
    assert_eq!(without("rope_theta").rope_theta, 10_000.0);
    assert!(!without("tie_word_embeddings").tied);
    assert!(without("hidden_act").gated());
}

#[test]
fn newer_files_keep_the_rotary_base_in_an_object() {
    let newer = LLAMA.replace(
        r#""rope_theta": 500000.0"#,
        r#""rope_parameters": {"rope_theta": 250000.0, "rope_type": "default"}"#,
    );
    assert_eq!(sound(&newer).rope_theta, 250_000.0);
}

#[test]
fn head_dim_may_differ_from_the_share() {
    let model = sound(&LLAMA.replace(r#""mlp_bias": false"#, r#""head_dim": 64"#));
    assert_eq!((model.head_dim, model.query_width()), (64, 2048));
}

#[test]
fn what_cannot_be_represented_is_named() {
    for (given, instead, expected) in [
        (
            r#""rope_scaling": null"#,
            r#""rope_scaling": {"factor": 8.0, "rope_type": "spiral"}"#,
            "config.json:13: rope scaling of type \"spiral\" is unknown; use linear,",
        ),
        (
            r#""rope_scaling": null"#,
            r#""rope_scaling": {"rope_type": "yarn", "type": "yarn"}, "use_qk_norm": true"#,
            "config.json:13: `use_qk_norm` is true: \"llama\" does not have it; leave it out",
        ),
        (
            r#""rope_scaling": null"#,
            r#""final_logit_softcapping": 30.0"#,
            "config.json:13: `final_logit_softcapping` is 30.0: \"llama\" does not have it",
        ),
        (
            r#""silu""#,
            r#""tanhshrink""#,
            "config.json:3: `hidden_act` is \"tanhshrink\"; use \"silu\" or",
        ),
    ] {
        let told = told(&LLAMA.replace(given, instead));
        assert!(told.starts_with(expected) && told.lines().count() == 1, "{told}");
    }
    let told = told(&GPT2.replace("\"n_ctx\": 1024", "\"scale_attn_weights\": false"));
    assert!(told.contains("`scale_attn_weights` is false: it cannot be represented"), "{told}");
}

#[test]
fn keys_without_effect_are_ignored() {
    let more = LLAMA.replace(
        r#""mlp_bias": false"#,
        r#""logit_scale": 1.0, "partial_rotary_factor": null, "my_favourite_colour": "blue""#,
    );
    assert_eq!(sound(&more), sound(LLAMA));
}

#[test]
fn positions_are_scaled_as_the_file_says() {
    let llama3 = sound(&LLAMA.replace(
        r#""rope_scaling": null"#,
        r#""rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}"#,
    ));
    let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
    assert_eq!(llama3.decoder().rotary.scaling, scaling);
    assert_eq!((llama3.kind, llama3.parameters()), (ModelKind::Decoder, 8_030_261_248));
    let dynamic = sound(&LLAMA.replace(
        r#""rope_scaling": null"#,
        r#""rope_scaling": {"factor": 2.0, "type": "dynamic"}"#,
    ));
    assert_eq!((dynamic.decoder().long_from, dynamic.decoder().long_growth), (8192, 2.0));
}

#[test]
fn a_window_is_kept_unless_it_is_null() {
    let mistral = LLAMA.replace(r#""model_type": "llama""#, r#""model_type": "mistral""#);
    let with_window = |window: &str| {
        sound(&mistral.replace(r#""mlp_bias": false"#, &format!("\"sliding_window\": {window}")))
    };
    assert_eq!(*with_window("null"), shape_of("llama3-8b"));
    let bites = with_window("4096").decoder();
    assert_eq!((bites.window, &*bites.attention), (4096, "s"));
    assert_eq!(sound(&mistral).decoder().window, 4096, "the default of its class");
}

/// Every family's fixture survives writing and reading, and its file is accepted as it is.
#[test]
fn families_write_what_they_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../exec/tests/fixtures/families");
    let mut seen = 0;
    #[expect(clippy::disallowed_methods, reason = "a test reads its fixtures")]
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let fixture: Json = serde_json::from_str(&text).unwrap();
        let config = fixture["config"].to_string();
        let model = sound(&config);
        let (family, plain) = Family::of(&model).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let written = family.write(&plain, plain.seq).to_string();
        let back = sound(&written);
        let (same, _) = Family::of(&back).unwrap();
        assert_eq!(same.name, family.name, "{path:?}");
        assert_eq!(same.write(&back, back.seq).to_string(), written, "{path:?}");
        let reread = Model::parse(&model.to_toml(), "m.toml").unwrap();
        assert_eq!(reread.to_toml(), model.to_toml(), "{path:?}");
        seen += 1;
    }
    assert!(seen > 30, "{seen} fixtures");
}

#[test]
fn a_model_that_no_family_covers_is_refused_with_what_is_too_much() {
    let text = "kind = \"decoder\"\nlayers = 2\nd_model = 64\nheads = 4\nffn = 96\nseq = 16\n\
                    vocab = 256\nqkv_bias = true\nqkv_clip = 4.0\n";
    let model = Model::parse(text, "m.toml").unwrap();
    let told = Family::of(&model).unwrap_err();
    assert!(told.contains("cannot have qkv_clip = 4.0"), "{told}");
}

#[test]
fn sizes_are_checked_in_the_words_of_the_file() {
    let text = GPT2.replace(r#""n_head": 12"#, r#""n_head": 7"#);
    assert_eq!(
        told(&text),
        "config.json:9: `n_head` is 7, which does not divide `n_embd` = 768; use 6 or 8"
    );
    // The nested "n_layer" on a later line must not be reported.
    for absurd in ["0", "-1", "1e30", "123456789012345678901234567890", "\"12\""] {
        let told = told(&GPT2.replace(r#""n_layer": 12"#, &format!("\"n_layer\": {absurd}")));
        assert!(told.starts_with("config.json:11: `n_layer` is"), "{told}");
        assert!(told.ends_with("use a whole number from 1 to 65535"), "{told}");
    }
    let told = told(&LLAMA.replace(r#""hidden_size": 4096,"#, ""));
    assert_eq!(
        told,
        "config.json:8: `hidden_size` is missing; add an entry such as `\"hidden_size\": 768`"
    );
}

#[test]
fn unknown_families_get_the_nearest() {
    let told = |family: &str| told(&GPT2.replace(r#"": "gpt2""#, &format!("\": \"{family}\"")));
    assert!(told("qwen33").contains("did you mean \"qwen3\"?"), "{}", told("qwen33"));
    let unlike = told("mamba-state-space");
    assert!(unlike.starts_with("config.json:6: `model_type` \"mamba-state-space\" is unknown"));
    assert!(unlike.contains("gpt2, llama, mistral,"), "{unlike}");
    assert!(self::told("{}").starts_with("config.json:1: `model_type` is missing"));
}

#[test]
fn what_is_no_config_is_told_with_its_line() {
    assert!(told("{\n\"a\": 1,\n}").starts_with("config.json:3: this is not JSON"));
    assert!(told("[]").starts_with("config.json:1: this is JSON, but not an object"));
    assert!(told("").starts_with("config.json:1: this is not JSON"));
}

#[test]
fn the_folder_names_the_model() {
    assert_eq!(name("hub/llama/config.json"), "llama");
    assert_eq!(name("./config.json"), "config");
    assert_eq!(name("my-gpt2.json"), "my-gpt2");
}
