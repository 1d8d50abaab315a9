//! Writer of described networks, as [`parse`](super::parse) reads them.

use super::{Input, Network, Op};

impl Network {
    /// Model file without its name and kind.
    pub(in crate::model) fn to_toml(&self) -> String {
        let mut text = String::from("\n[input]\n");
        text += &match self.input {
            Input::Digits => "data = \"digits\"\n".to_owned(),
            Input::Images { side, channels, classes } => format!(
                "data = \"images\"\nside = {side}\nchannels = {channels}\nclasses = {classes}\n"
            ),
            Input::Tokens { vocab, seq } => {
                format!("data = \"tokens\"\nvocab = {vocab}\nseq = {seq}\n")
            }
        };
        for layer in &self.layers {
            text += &format!("\n[[layer]]\nname = \"{}\"\n", layer.name);
            if layer.repeat > 1 {
                text += &format!("repeat = {}\n", layer.repeat);
            }
            text += "operators = [\n";
            for operator in &layer.operators {
                let makes = match &*operator.makes {
                    "" => String::new(),
                    name => format!(", makes = \"{name}\""),
                };
                let (word, rest) = words(&operator.op);
                let reads = &operator.reads;
                text += &format!("    {{ op = \"{word}\", reads = {reads:?}{makes}{rest} }},\n");
            }
            text += "]\n";
        }
        text
    }
}

/// Word of an operator, and its other keys.
fn words(op: &Op) -> (String, String) {
    let (word, rest) = match *op {
        Op::Linear { width, bias, init } => {
            ("linear", format!(", width = {width}, bias = {bias}, init = {init:?}"))
        }
        Op::Activation { function } => return (function.name().to_owned(), String::new()),
        Op::Norm { rms, eps } => {
            (if rms { "rms_norm" } else { "layer_norm" }, format!(", eps = {eps:?}"))
        }
        Op::Add => ("add", String::new()),
        Op::Concat => ("concat", String::new()),
        Op::Slice { first, width } => ("slice", format!(", first = {first}, width = {width}")),
        Op::Scale { factor } => ("scale", format!(", factor = {factor:?}")),
        Op::Embedding { width, init } => {
            ("embedding", format!(", width = {width}, init = {init:?}"))
        }
        Op::Position => ("position", String::new()),
        Op::Attention { heads, kv_heads, causal } => {
            ("attention", format!(", heads = {heads}, kv_heads = {kv_heads}, causal = {causal}"))
        }
        Op::Conv { filters, kernel, stride } => {
            ("conv", format!(", filters = {filters}, kernel = {kernel}, stride = {stride}"))
        }
        Op::BatchNorm { eps } => ("batch_norm", format!(", eps = {eps:?}")),
        Op::MaxPool { kernel, stride } => {
            ("max_pool", format!(", kernel = {kernel}, stride = {stride}"))
        }
        Op::AveragePool => ("average_pool", String::new()),
        Op::CrossEntropy => ("cross_entropy", String::new()),
    };
    (word.to_owned(), rest)
}
