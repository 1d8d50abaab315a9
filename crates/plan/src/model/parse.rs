//! Model files: TOML, one key per field.

use super::codec::Codec;
use super::features::features;
use super::field::{Field, Words};
use super::fields::{Fields, Given};
use super::{
    Activation, Body, Decoder, Model, ModelKind, Position, decoder, dlrm, network, resnet,
};
use crate::located::{self, Errors, quoted};
use crate::suggest::suggest;

impl Model {
    /// Reads a model file. `file_name` names the file in errors; its stem is the model's name
    /// unless the file has a `name`.
    ///
    /// `kind`, `layers`, `d_model`, `seq` and `vocab` are required, `heads` if there is attention,
    /// and `ffn` except for `gpt2`, where it defaults to `4 · d_model`. Other defaults: `kv_heads`
    /// is `heads`, `head_dim` is `d_model / heads`, `positions` is `seq`, `norm_eps` is 1e-5,
    /// `rope_theta` is 10000, `activation` is the kind's own, and `tied` is true for `gpt2` only. A
    /// `moe` requires `experts` and `topk`; its `router` defaults to "softmax" and its
    /// `route_scale` to 1. Its other features (`shared_experts`, `dense_layers` with `dense_ffn`,
    /// `capacity`, `balance`, `qk_norm`, latent attention) are present only if given. The same
    /// holds for the multi-token prediction modules of a `llama` or a `moe` (`mtp_depth`, and
    /// `mtp_weight` with default 0.3).
    pub fn parse(text: &str, file_name: &str) -> Result<Self, Errors> {
        let mut fields =
            Fields::new(Words::TOML, file_name, located::parse(text, file_name)?.entries);
        let Some(kind) = kind(&mut fields) else { return Err(fields.give_up()) };
        match kind {
            ModelKind::Resnet => {
                let body = resnet::parse(&mut fields);
                return fields.finish_body(file_name, body);
            }
            ModelKind::Dlrm => {
                let body = dlrm::parse(&mut fields);
                return fields.finish_body(file_name, body);
            }
            ModelKind::Graph => {
                let body = network::parse(&mut fields);
                return fields.finish_body(file_name, body);
            }
            ModelKind::Mlp
            | ModelKind::Gpt2
            | ModelKind::Llama
            | ModelKind::Moe
            | ModelKind::Decoder => {}
        }
        let applying = Field::ALL.into_iter().filter(|field| field.applies_to(kind));
        let mut known: Vec<_> = applying.map(|field| field.word()).collect();
        let (mut layers, mut rope_theta) = (Decoder::default(), 10_000.0);
        if kind == ModelKind::Decoder {
            let mut codec = Codec::reader(&mut fields);
            features(&mut codec, &mut layers);
            known.extend(codec.known());
            if layers.position != Position::Rotary {
                rope_theta = 0.0;
            }
        }
        fields.refuse_unknown(kind, &known);
        let activation = activation(&mut fields, kind);
        let norm_eps = 1e-5;
        let given = Given { kind, activation, norm_eps, needs_kv_heads: false, rope_theta };
        let mut shape = fields.shape(&given);
        if layers.position == Position::Learned && shape.max_positions == 0 {
            shape.max_positions = shape.seq;
        }
        let name = fields.text(Field::Name).unwrap_or_else(|| stem(file_name).to_owned());
        let family = if Field::Family.applies_to(kind) { fields.family() } else { None };
        let model = match kind {
            ModelKind::Decoder => {
                let (shape, body) = decoder::shortest(shape, layers);
                fields.finish(name, shape, body)
            }
            _ => fields.finish(name, shape, Body::Tokens {}),
        };
        Ok(Self { family, ..model? })
    }

    /// Writes a model file that [`Model::parse`] reads back to an equal model.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let rest = match self.body() {
            Body::Tokens {} | Body::Decoder { .. } => None,
            Body::Images(net) => Some(resnet::to_toml(net)),
            Body::Clicks(net) => Some(dlrm::to_toml(net)),
            Body::Network(net) => Some(net.to_toml()),
        };
        if let Some(rest) = rest {
            let name = toml::Value::String(self.name().to_owned());
            return format!("name = {name}\nkind = \"{}\"\n{rest}", self.kind);
        }
        for field in Field::ALL.into_iter().filter(|field| field.applies_to(self.kind)) {
            let value = match field {
                Field::Name => toml::Value::String(self.name().to_owned()).to_string(),
                Field::Family => match self.family {
                    Some(family) => format!("\"{family}\""),
                    None => continue,
                },
                Field::Kind => format!("\"{}\"", self.kind),
                Field::Layers => self.layers.to_string(),
                Field::DModel => self.d_model.to_string(),
                Field::Heads => self.heads.to_string(),
                Field::KvHeads => self.kv_heads.to_string(),
                Field::HeadDim => self.head_dim.to_string(),
                Field::Ffn => self.ffn.to_string(),
                Field::Seq => self.seq.to_string(),
                Field::Positions => self.max_positions.to_string(),
                Field::Vocab => self.vocab.to_string(),
                Field::Tied => self.tied.to_string(),
                Field::Gated => self.gated().to_string(),
                Field::Activation => format!("\"{}\"", self.activation),
                Field::NormEps => format!("{:?}", self.norm_eps),
                Field::RopeTheta => format!("{:?}", self.rope_theta),
                Field::Experts => self.experts.experts.to_string(),
                Field::Topk => self.experts.topk.to_string(),
                Field::SharedExperts => self.experts.shared_experts.to_string(),
                Field::DenseLayers => self.experts.dense_layers.to_string(),
                Field::DenseFfn => self.experts.dense_ffn.to_string(),
                Field::Router => format!("\"{}\"", self.experts.router),
                Field::Groups => self.experts.groups.to_string(),
                Field::GroupTopk => self.experts.group_topk.to_string(),
                Field::RouteScale => format!("{:?}", self.experts.route_scale),
                Field::Capacity => format!("{:?}", self.experts.capacity),
                Field::Balance => format!("{:?}", self.experts.balance),
                Field::QkNorm => self.qk_norm.to_string(),
                Field::QLora => self.latent.q_lora.to_string(),
                Field::KvLora => self.latent.kv_lora.to_string(),
                Field::QkRope => self.latent.qk_rope.to_string(),
                Field::VDim => self.latent.v_dim.to_string(),
                Field::MtpDepth => self.mtp.depth.to_string(),
                Field::MtpWeight => format!("{:?}", self.mtp.weight),
            };
            let absent = field.may_lack(self.kind) && matches!(&*value, "0" | "0.0");
            if !absent {
                text.push_str(&format!("{} = {value}\n", field.word()));
            }
        }
        if let Body::Decoder { decoder } = self.body() {
            let mut codec = Codec::terse_writer();
            features(&mut codec, &mut decoder.clone());
            for (key, value) in codec.written() {
                text.push_str(&format!("{key} = {value}\n"));
            }
        }
        text
    }
}

/// File name without folders and extension.
pub(super) fn stem(file_name: &str) -> &str {
    let base = file_name.rsplit(['/', '\\']).next().unwrap_or(file_name);
    match base.rsplit_once('.') {
        Some((stem, _)) if !stem.is_empty() => stem,
        _ if base.is_empty() => "model",
        _ => base,
    }
}

fn kind(fields: &mut Fields) -> Option<ModelKind> {
    let known = ModelKind::ALL.map(|kind| format!("\"{kind}\"")).join(", ");
    if fields.entry(Field::Kind).is_none() {
        let remedy = format!("add a line such as `kind = \"gpt2\"` (known: {known})");
        fields.blame(Field::Kind, "`kind` is missing".to_owned(), remedy);
        return None;
    }
    let word = fields.text(Field::Kind)?;
    if let Some(kind) = ModelKind::ALL.into_iter().find(|kind| kind.name() == word) {
        return Some(kind);
    }
    let remedy = match suggest(&word, ModelKind::ALL.map(ModelKind::name)) {
        Some(meant) => format!("did you mean \"{meant}\"? (known: {known})"),
        None => format!("use one of {known}"),
    };
    let problem = format!("kind {} is unknown", quoted(&word));
    fields.blame(Field::Kind, problem, remedy);
    None
}

/// Reads the activation from `activation` and `gated`, which must agree if both are given.
fn activation(fields: &mut Fields, kind: ModelKind) -> Activation {
    let own = kind.activations()[0];
    let gated = if Field::Gated.applies_to(kind) { fields.flag(Field::Gated) } else { None };
    let named = named_activation(fields, kind);
    let is_gated = named.unwrap_or(own).gated();
    match gated {
        Some(true) if !is_gated => fields.blame(
            Field::Gated,
            "`gated` is true, but the activation has no gate".to_owned(),
            "use activation = \"swiglu\", or leave `gated` out",
        ),
        Some(false) if is_gated => fields.blame(
            Field::Gated,
            "`gated` is false, but \"swiglu\" has a gate".to_owned(),
            "name another activation, such as activation = \"gelu\", or leave `gated` out",
        ),
        _ => {}
    }
    named.unwrap_or(own)
}

fn named_activation(fields: &mut Fields, kind: ModelKind) -> Option<Activation> {
    let word = fields.text(Field::Activation)?;
    let found = Activation::ALL.into_iter().find(|activation| activation.name() == word);
    if found.is_none() {
        let known = kind.activations().iter().map(|a| a.name());
        let remedy = match suggest(&word, known.clone()) {
            Some(meant) => format!("did you mean \"{meant}\"?"),
            None => format!("use one of {}", known.collect::<Vec<_>>().join(", ")),
        };
        fields.blame(Field::Activation, format!("activation {} is unknown", quoted(&word)), remedy);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::count::tests::shapes;
    use proptest::prelude::*;

    const GPT2: &str =
        "kind = \"gpt2\"\nlayers = 2\nd_model = 64\nheads = 4\nseq = 16\nvocab = 256\n";
    const LLAMA: &str = "kind = \"llama\"\nlayers = 2\nd_model = 64\nheads = 4\nffn = 96\nseq = 16\n\
                         vocab = 256\n";
    const MLP: &str = "kind = \"mlp\"\nlayers = 2\nd_model = 64\nffn = 96\nseq = 16\nvocab = 256\n";

    fn sound(text: &str) -> Model {
        Model::parse(text, "models/test.toml").unwrap_or_else(|errors| panic!("{errors}"))
    }

    /// Errors of a text, one per line.
    fn told(text: &str) -> String {
        Model::parse(text, "m.toml").expect_err("the text is wrong").to_string()
    }

    /// Asserts that a text gives exactly the expected error message.
    fn assert_told(text: &str, expected: &str) {
        assert_eq!(told(text), expected, "{text}");
    }

    #[test]
    fn a_short_gpt2_gets_the_customary_rest() {
        let model = sound(GPT2);
        assert_eq!(model.name(), "test");
        assert_eq!((model.kv_heads, model.head_dim, model.ffn), (4, 16, 256));
        assert_eq!((model.max_positions, model.tied), (16, true));
        assert_eq!((model.norm_eps, model.activation), (1e-5, Activation::Gelu));
    }

    #[test]
    fn a_short_llama_gets_the_customary_rest() {
        let model = sound(LLAMA);
        assert_eq!((model.kv_heads, model.head_dim, model.max_positions), (4, 16, 0));
        assert_eq!((model.tied, model.gated()), (false, true));
        assert_eq!((model.norm_eps, model.rope_theta), (1e-5, 10_000.0));
    }

    #[test]
    fn every_field_can_be_given() {
        let model = sound(&format!("name = \"a b\"\n{GPT2}positions = 32\nkv_heads = 2\n"));
        assert_eq!((model.name(), model.max_positions, model.kv_heads), ("a b", 32, 2));
        let model = sound(&format!(
            "{LLAMA}head_dim = 32\nrope_theta = 500000\nnorm_eps = 1e-6\ntied = true\n\
             gated = false\nactivation = \"squared-relu\"\n"
        ));
        assert_eq!((model.head_dim, model.query_width(), model.tied), (32, 128, true));
        assert_eq!((model.rope_theta, model.norm_eps), (500_000.0, 1e-6));
        assert_eq!((model.activation, model.gated()), (Activation::SquaredRelu, false));
    }

    #[test]
    fn sizes_that_are_none_are_told_with_line_and_range() {
        for (value, shown) in [
            ("0", "0"),
            ("-3", "-3"),
            ("1e30", "1e30"),
            ("2.5", "2.5"),
            ("nan", "NaN"),
            ("18446744073709551615", "18446744073709551615"),
            ("99999999999999999999999999999999999999999999", "a number too large to hold"),
            ("\"2\"", "\"2\""),
            ("[2]", "a list"),
            ("true", "true"),
        ] {
            assert_told(
                &GPT2.replace("layers = 2", &format!("layers = {value}")),
                &format!("m.toml:2: `layers` is {shown}; use a whole number from 1 to 65535"),
            );
        }
    }

    #[test]
    fn heads_must_divide() {
        assert_told(
            &GPT2.replace("heads = 4", "heads = 5"),
            "m.toml:4: `heads` is 5, which does not divide `d_model` = 64; \
             use 4 or 8, or give `head_dim`",
        );
        assert_told(
            &format!("{GPT2}kv_heads = 3"),
            "m.toml:7: `kv_heads` is 3, which does not divide `heads` = 4; use 2 or 4",
        );
        let odd = told(&format!("{LLAMA}head_dim = 15"));
        assert!(
            odd.starts_with("m.toml:8: `head_dim` is 15") && odd.contains("use an even"),
            "{odd}"
        );
    }

    #[test]
    fn a_wrong_size_does_not_spread() {
        for (given, wrong) in [("heads = 4", "heads = 0"), ("d_model = 64", "d_model = -64")] {
            assert_eq!(told(&GPT2.replace(given, wrong)).lines().count(), 1);
        }
        assert_eq!(told(&GPT2.replace("seq = 16", "seq = 0")).lines().count(), 1);
    }

    #[test]
    fn all_problems_come_at_once_in_the_order_of_lines() {
        let text = "layers = 0\nkind = \"gpt2\"\nd_model = 64\nheads = 5\nlayer = 3\nvocab = 9e9";
        let told = told(text);
        let expected = [
            "m.toml:1: `layers` is 0; use",
            "m.toml:2: `seq` is missing; add a line such as `seq = 1024`",
            "m.toml:4: `heads` is 5, which does not divide",
            "m.toml:5: \"layer\" is not a key",
            "m.toml:6: `vocab` is 9000000000.0; use",
        ];
        assert_eq!(told.lines().count(), expected.len(), "{told}");
        for (line, expected) in told.lines().zip(expected) {
            assert!(line.starts_with(expected), "{line}");
        }
    }

    #[test]
    fn totals_beyond_reason_are_told() {
        let told = told(
            "kind = \"llama\"\nlayers = 65535\nd_model = 16777216\nheads = 4\nffn = 67108864\n\
             seq = 16\nvocab = 2147483648",
        );
        assert!(told.starts_with("m.toml:2: the model would have 3."), "{told}");
        assert!(told.ends_with("lower one of `layers`, `d_model`, `ffn`, `vocab`"), "{told}");
    }

    #[test]
    fn unknown_keys_get_the_nearest() {
        for (key, meant) in [
            ("layer", "layers"),
            ("dmodel", "d_model"),
            ("rope-thet", "rope_theta"),
            ("hidden_size", "d_model"),
            ("num_key_value_heads", "kv_heads"),
            ("n_layer", "layers"),
        ] {
            let expected = format!(
                "m.toml:8: \"{key}\" is not a key of a model file; did you mean `{meant}`?"
            );
            assert_told(&format!("{LLAMA}{key} = 7"), &expected);
        }
        assert_told(
            &format!("{LLAMA}[model]\nlayers = 3"),
            "m.toml:8: \"model\" is a section, and a model file has none; \
             write the keys without `[model]` above them",
        );
        assert_told(
            &format!("{MLP}zzz = 3"),
            "m.toml:7: \"zzz\" is not a key of a model file; \
             use one of name, kind, layers, d_model, ffn, seq, vocab, tied, activation",
        );
    }

    #[test]
    fn keys_of_other_kinds_are_refused() {
        for (text, key) in [
            (MLP, "heads = 4"),
            (MLP, "norm_eps = 1e-5"),
            (GPT2, "rope_theta = 1e4"),
            (GPT2, "gated = true"),
            (LLAMA, "positions = 32"),
        ] {
            let told = told(&format!("{text}{key}"));
            assert_eq!(told.lines().count(), 1, "{told}");
            assert!(told.contains("does not apply to kind") && told.ends_with("leave it out"));
        }
        assert_told(
            &format!("{LLAMA}experts = 8"),
            "m.toml:8: `experts` does not apply to kind \"llama\"; leave it out",
        );
    }

    #[test]
    fn kinds_are_named() {
        let told_of = |text: &str| told(text);
        assert!(told_of("kind = \"gtp2\"").contains("did you mean \"gpt2\"?"));
        assert!(told_of("kind = \"bert\"").contains("use one of"));
        assert!(told_of("kind = 2").starts_with("m.toml:1: `kind` is 2; use a text in quotes"));
        assert!(told_of("").starts_with("m.toml:1: `kind` is missing; add a line such as"));
    }

    #[test]
    fn activations_must_fit_the_kind() {
        assert_told(
            &format!("{GPT2}activation = \"swiglu\""),
            "m.toml:7: `activation` is \"swiglu\", which kind \"gpt2\" does not have; \
             use \"gelu\" or \"relu\" or \"squared-relu\"",
        );
        assert_told(
            &format!("{GPT2}activation = \"gleu\""),
            "m.toml:7: activation \"gleu\" is unknown; did you mean \"gelu\"?",
        );
        assert!(told(&format!("{LLAMA}gated = false")).contains("name another activation"));
        assert!(
            told(&format!("{LLAMA}gated = true\nactivation = \"gelu\""))
                .starts_with("m.toml:8: `gated` is true, but the activation has no gate; use")
        );
    }

    #[test]
    fn reals_must_make_sense() {
        for value in ["0", "-1e-5", "nan", "inf", "1e30", "0.5"] {
            let told = told(&format!("{GPT2}norm_eps = {value}"));
            assert!(told.starts_with("m.toml:7: `norm_eps` is"), "{told}");
            assert!(told.ends_with("use a small positive number such as 1e-5"), "{told}");
        }
        for value in ["0", "nan", "-10000", "1e30", "\"big\""] {
            let told = told(&format!("{LLAMA}rope_theta = {value}"));
            assert!(told.starts_with("m.toml:8: `rope_theta` is"), "{told}");
            assert!(told.contains("use a number such as 10000.0"), "{told}");
        }
    }

    #[test]
    fn sequences_stay_within_the_positions() {
        assert_told(
            &format!("{GPT2}positions = 8"),
            "m.toml:5: `seq` is 16, beyond the table of learned positions; \
             use at most 8, or raise `positions` in the model file",
        );
    }

    #[test]
    fn broken_toml_is_told_with_its_line() {
        let told = told(&format!("{GPT2}tied = = true\nlayers = 3\n"));
        assert!(told.lines().next().unwrap().starts_with("m.toml:7: not TOML:"), "{told}");
        assert!(told.contains("m.toml:8:"), "the repeated key is told too: {told}");
    }

    #[test]
    fn long_words_are_cut() {
        let told = told(&format!("{GPT2}activation = \"{}\"", "x".repeat(1_000_000)));
        assert!(told.len() < 300, "{}", told.len());
    }

    #[test]
    fn names_come_from_the_file() {
        for (file, name) in [
            ("models/gpt2-1.5b.toml", "gpt2-1.5b"),
            ("C:\\models\\a.toml", "a"),
            ("plain", "plain"),
            (".toml", ".toml"),
            ("", "model"),
            ("folder/", "model"),
        ] {
            assert_eq!(stem(file), name);
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(shape in shapes(), name in any::<String>()) {
            if let Ok(model) = Model::new(name, shape) {
                let read = Model::parse(&model.to_toml(), "elsewhere.toml");
                prop_assert_eq!(read, Ok(model));
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,200}") {
            let _ = Model::parse(&text, "m.toml");
        }

        #[test]
        fn any_values_are_read_or_refused(
            kind in prop::sample::select(vec!["mlp", "gpt2", "llama", "moe"]),
            values in prop::collection::vec(any::<i64>().prop_map(|v| v >> (v & 63)), 30),
        ) {
            let keys = Field::ALL.into_iter().skip(2).zip(values);
            let lines = keys.map(|(field, value)| format!("{} = {value}\n", field.word()));
            let text = format!("kind = \"{kind}\"\n{}", lines.collect::<String>());
            let errors = Model::parse(&text, "m.toml").expect_err("flags are never numbers");
            for problem in errors.problems {
                prop_assert!(problem.line.is_some() && !problem.remedy.is_empty());
            }
        }
    }
}
