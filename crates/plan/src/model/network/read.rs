//! Reader of described networks, and the check of what it read.

use super::{CONTINUATION, Input, Layer, Network, Op, Operator, PIXELS, Shape, TOKENS, shapes};
use crate::located::{Entry, Section, Table, Value, meant, quoted, short};
use crate::model::fields::Fields;
use crate::model::{Activation, Body, ModelKind};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// Ranges far above trained networks, low enough that no product of them overflows.
const WIDTH: RangeInclusive<u64> = 1..=1 << 24;
const SIDE: RangeInclusive<u64> = 1..=1 << 12;
const KERNEL: RangeInclusive<u64> = 1..=1 << 8;
const HEADS: RangeInclusive<u64> = 1..=1 << 12;
const LAYERS: RangeInclusive<u64> = 1..=1 << 16;
const OPERATORS: usize = 1 << 12;

/// Operators and their keys besides `op`, `reads` and `makes`.
const OPS: [(&str, &[&str]); 18] = [
    ("linear", &["width", "bias", "init"]),
    ("relu", &[]),
    ("gelu", &[]),
    ("gelu-erf", &[]),
    ("squared-relu", &[]),
    ("layer_norm", &["eps"]),
    ("rms_norm", &["eps"]),
    ("add", &[]),
    ("concat", &[]),
    ("slice", &["first", "width"]),
    ("scale", &["factor"]),
    ("embedding", &["width", "init"]),
    ("position", &[]),
    ("attention", &["heads", "kv_heads", "causal"]),
    ("conv", &["filters", "kernel", "stride"]),
    ("batch_norm", &["eps"]),
    ("max_pool", &["kernel", "stride"]),
    ("average_pool", &[]),
];
const LOSS: &str = "cross_entropy";

/// Lines of the layers and of their operators.
type Lines = Vec<(usize, Vec<usize>)>;

/// Reads a model file of kind `graph`. Problems are recorded in `fields`.
pub(in crate::model) fn parse(fields: &mut Fields) -> Body {
    fields.refuse_unknown(ModelKind::Graph, &["name", "kind", "input", "layer"]);
    let mut lines = Lines::new();
    let network = Network { input: input(fields), layers: layers(fields, &mut lines) };
    if fields.is_sound() {
        let line = |layer: usize, operator: Option<usize>| {
            let (line, operators) = lines.get(layer)?;
            Some(operator.and_then(|at| operators.get(at).copied()).unwrap_or(*line))
        };
        for (line, problem, remedy) in problems(&network, &line) {
            fields.note(line.unwrap_or(1), problem, remedy);
        }
    }
    Body::Network(network)
}

/// A table of the file whose problems are recorded.
struct Reader<'a, 'b> {
    fields: &'a mut Fields,
    section: Section<'b>,
}

impl Reader<'_, '_> {
    fn whole(&mut self, key: &str, range: RangeInclusive<u64>, absent: Option<u64>) -> u64 {
        let (least, most) = (*range.start(), *range.end());
        match (self.section.get(key), absent) {
            (None, Some(absent)) => absent,
            (None, None) => {
                let what = format!("{} has no `{key}`", self.section.label);
                self.fields.note(self.section.table.line, what, format!("add `{key} = …`"));
                least
            }
            (Some(value), _) => value.whole(range).unwrap_or_else(|| {
                let what = format!("{}: `{key}` is {value}", self.section.label);
                let remedy = format!("use a whole number from {least} to {most}");
                self.fields.note(self.section.line_of(key), what, remedy);
                least
            }),
        }
    }

    fn number(&mut self, key: &str, sound: fn(f64) -> bool, absent: Option<f64>) -> f64 {
        let Some(value) = self.section.get(key) else {
            if absent.is_none() {
                let what = format!("{} has no `{key}`", self.section.label);
                self.fields.note(self.section.table.line, what, format!("add `{key} = …`"));
            }
            return absent.unwrap_or(1.0);
        };
        value.number().filter(|&number| number.is_finite() && sound(number)).unwrap_or_else(|| {
            let what = format!("{}: `{key}` is {value}", self.section.label);
            self.fields.note(self.section.line_of(key), what, "use a finite number in its range");
            1.0
        })
    }

    fn flag(&mut self, key: &str, absent: bool) -> bool {
        let Some(value) = self.section.get(key) else { return absent };
        value.flag().unwrap_or_else(|| {
            let what = format!("{}: `{key}` is {value}", self.section.label);
            self.fields.note(self.section.line_of(key), what, "use true or false");
            absent
        })
    }

    /// A name; `None` if it is absent or unfit, which is recorded if it is required.
    fn name(&mut self, key: &str, required: bool) -> Option<String> {
        let label = &self.section.label;
        let (what, remedy) = match self.section.get(key) {
            None if !required => return None,
            None => (format!("{label} has no `{key}`"), format!("add `{key} = \"…\"`")),
            Some(value) => match value.text() {
                Some(text) if is_name(text) => return Some(text.to_owned()),
                _ => (
                    format!("{label}: `{key}` is {value}"),
                    "use letters, digits, `_` and `-` in quotes".to_owned(),
                ),
            },
        };
        self.fields.note(self.section.line_of(key), what, remedy);
        None
    }
}

fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (1..=64).contains(&text.len()) && text.chars().all(plain)
}

/// The table of an entry; anything else is recorded.
fn table(fields: &mut Fields, entry: &Entry, label: &str) -> Option<Table> {
    let found = entry.value.table().cloned();
    if found.is_none() {
        let what = format!("{label} is {}", entry.value);
        fields.note(entry.line, what, "make it a table of keys and values");
    }
    found
}

fn refuse_unknown(reader: &mut Reader<'_, '_>, known: &[&str]) {
    for (key, entry) in &reader.section.table.entries {
        if !known.contains(&&**key) {
            let what = format!("{} has an unknown key '{}'", reader.section.label, short(key));
            reader.fields.note(entry.line, what, meant(key, known));
        }
    }
}

fn input(fields: &mut Fields) -> Input {
    let Some(entry) = fields.entries().get("input").cloned() else {
        let remedy = "add a table [input] with data = \"digits\", \"images\" or \"tokens\"";
        fields.note(fields.anchor(), "the graph has no [input]".to_owned(), remedy);
        return Input::Digits;
    };
    let Some(table) = table(fields, &entry, "[input]") else { return Input::Digits };
    let section = Section { table: &table, label: "[input]".to_owned() };
    let mut reader = Reader { fields, section };
    let known: [(&str, &[&str]); 3] = [
        ("digits", &["data"]),
        ("images", &["data", "side", "channels", "classes"]),
        ("tokens", &["data", "vocab", "seq"]),
    ];
    let Some(data) = reader.name("data", true) else { return Input::Digits };
    let Some((_, keys)) = known.iter().find(|(name, _)| *name == data) else {
        let (line, names) = (reader.section.line_of("data"), known.map(|(name, _)| name));
        let what = format!("there are no data {}", quoted(&data));
        reader.fields.note(line, what, meant(&data, &names));
        return Input::Digits;
    };
    refuse_unknown(&mut reader, keys);
    match &*data {
        "images" => Input::Images {
            side: reader.whole("side", SIDE, None),
            channels: reader.whole("channels", KERNEL, Some(3)),
            classes: reader.whole("classes", WIDTH, None),
        },
        "tokens" => Input::Tokens {
            vocab: reader.whole("vocab", WIDTH, None),
            // Numbers of positions ahead are 16-bit.
            seq: reader.whole("seq", 1..=1 << 15, None),
        },
        _ => Input::Digits,
    }
}

fn layers(fields: &mut Fields, lines: &mut Lines) -> Vec<Layer> {
    let Some(Entry { line, value }) = fields.entries().get("layer").cloned() else {
        let remedy = "add tables [[layer]], each with a name and operators";
        fields.note(fields.anchor(), "the graph has no [[layer]]".to_owned(), remedy);
        return Vec::new();
    };
    let Value::List(list) = value else {
        fields.note(line, format!("`layer` is {value}"), "write [[layer]] above each");
        return Vec::new();
    };
    let mut layers = Vec::new();
    for (at, entry) in list.iter().enumerate() {
        let label = format!("layer {}", at + 1);
        let Some(table) = table(fields, entry, &label) else { continue };
        let section = Section { table: &table, label };
        let mut reader = Reader { fields, section };
        refuse_unknown(&mut reader, &["name", "repeat", "operators"]);
        let name = reader.name("name", true).unwrap_or_default();
        let repeat = reader.whole("repeat", LAYERS, Some(1));
        let mut of_operators = Vec::new();
        let operators = operators(&mut reader, &mut of_operators);
        lines.push((table.line, of_operators));
        layers.push(Layer { name, repeat, operators });
    }
    layers
}

fn operators(reader: &mut Reader<'_, '_>, lines: &mut Vec<usize>) -> Vec<Operator> {
    let (label, line) = (reader.section.label.clone(), reader.section.line_of("operators"));
    let list = match reader.section.get("operators") {
        Some(Value::List(list)) if (1..=OPERATORS).contains(&list.len()) => list,
        given => {
            let is = given.map_or("absent".to_owned(), ToString::to_string);
            let what = format!("{label}: `operators` is {is}");
            let remedy = "list operators: { op = \"relu\", reads = [\"x\"], makes = \"y\" }";
            reader.fields.note(line, what, remedy);
            return Vec::new();
        }
    };
    let mut operators = Vec::new();
    for (at, entry) in list.iter().enumerate() {
        let label = format!("{label}, operator {}", at + 1);
        let Some(table) = table(reader.fields, entry, &label) else { continue };
        let section = Section { table: &table, label };
        let mut reader = Reader { fields: &mut *reader.fields, section };
        if let Some(operator) = operator(&mut reader) {
            lines.push(entry.line);
            operators.push(operator);
        }
    }
    operators
}

fn operator(reader: &mut Reader<'_, '_>) -> Option<Operator> {
    let word = reader.name("op", true)?;
    let loss = word == LOSS;
    let Some(keys) =
        OPS.iter().find(|(name, _)| *name == word).map(|(_, keys)| *keys).or(loss.then_some(&[]))
    else {
        let mut names = OPS.map(|(name, _)| name).to_vec();
        names.push(LOSS);
        let what = format!("{}: there is no operator {}", reader.section.label, quoted(&word));
        reader.fields.note(reader.section.line_of("op"), what, meant(&word, &names));
        return None;
    };
    let known: Vec<&str> = ["op", "reads", "makes"].iter().chain(keys).copied().collect();
    refuse_unknown(reader, &known);
    let positive = |number: f64| number > 0.0;
    let op = match &*word {
        "linear" => Op::Linear {
            width: reader.whole("width", WIDTH, None),
            bias: reader.flag("bias", true),
            init: reader.number("init", |number| number >= 0.0, Some(0.0)),
        },
        "relu" => Op::Activation { function: Activation::Relu },
        "gelu" => Op::Activation { function: Activation::Gelu },
        "gelu-erf" => Op::Activation { function: Activation::GeluErf },
        "squared-relu" => Op::Activation { function: Activation::SquaredRelu },
        "layer_norm" | "rms_norm" => {
            Op::Norm { rms: word == "rms_norm", eps: reader.number("eps", positive, Some(1e-5)) }
        }
        "add" => Op::Add,
        "concat" => Op::Concat,
        "slice" => Op::Slice {
            first: reader.whole("first", 0..=*WIDTH.end(), Some(0)),
            width: reader.whole("width", WIDTH, None),
        },
        "scale" => Op::Scale { factor: reader.number("factor", |number| number != 0.0, None) },
        "embedding" => Op::Embedding {
            width: reader.whole("width", WIDTH, None),
            init: reader.number("init", |number| number >= 0.0, Some(0.02)),
        },
        "position" => Op::Position,
        "attention" => {
            let heads = reader.whole("heads", HEADS, None);
            let kv_heads = reader.whole("kv_heads", HEADS, Some(heads));
            Op::Attention { heads, kv_heads, causal: reader.flag("causal", true) }
        }
        "conv" => Op::Conv {
            filters: reader.whole("filters", WIDTH, None),
            kernel: reader.whole("kernel", KERNEL, Some(3)),
            stride: reader.whole("stride", KERNEL, Some(1)),
        },
        "batch_norm" => Op::BatchNorm { eps: reader.number("eps", positive, Some(1e-5)) },
        "max_pool" => Op::MaxPool {
            kernel: reader.whole("kernel", KERNEL, Some(2)),
            stride: reader.whole("stride", KERNEL, Some(2)),
        },
        "average_pool" => Op::AveragePool,
        _ => Op::CrossEntropy,
    };
    let makes = match loss {
        true => String::new(),
        false => reader.name("makes", true)?,
    };
    Some(Operator { op, reads: reads(reader)?, makes })
}

fn reads(reader: &mut Reader<'_, '_>) -> Option<Vec<String>> {
    let name = |value: &Value| value.text().filter(|text| is_name(text)).map(str::to_owned);
    let found = match reader.section.get("reads") {
        Some(Value::List(list)) => list.iter().map(|entry| name(&entry.value)).collect(),
        Some(value) => name(value).map(|name| vec![name]),
        None => None,
    };
    if found.is_none() {
        let what = format!("{}: `reads` is not a list of names", reader.section.label);
        let remedy = "name the tensors that it reads: reads = [\"x\"]";
        reader.fields.note(reader.section.line_of("reads"), what, remedy);
    }
    found
}

/// Line, problem and remedy of everything that is wrong with a network. `line` gives the line of a
/// layer, or of an operator of it.
pub(super) fn problems(
    network: &Network,
    line: &dyn Fn(usize, Option<usize>) -> Option<usize>,
) -> Vec<(Option<usize>, String, String)> {
    let mut check = Check { network, line, problems: Vec::new() };
    check.names();
    let mut shapes: BTreeMap<&str, Shape> = network.input.tensors().into_iter().collect();
    for (at, layer) in network.layers.iter().enumerate() {
        // The second of equal layers reads what the first one made.
        for _ in 0..layer.repeat.min(2) {
            if !check.layer(at, layer, &mut shapes) {
                return check.problems;
            }
        }
    }
    check.losses();
    check.problems
}

struct Check<'a> {
    network: &'a Network,
    line: &'a dyn Fn(usize, Option<usize>) -> Option<usize>,
    problems: Vec<(Option<usize>, String, String)>,
}

impl<'a> Check<'a> {
    fn say(&mut self, layer: usize, operator: Option<usize>, what: String, remedy: &str) {
        let line = (self.line)(layer, operator);
        let problem = (line, what, remedy.to_owned());
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn names(&mut self) {
        let mut names = BTreeSet::new();
        for (at, layer) in self.network.layers.iter().enumerate() {
            if !names.insert(&layer.name) {
                let what = format!("two layers are called '{}'", layer.name);
                self.say(at, None, what, "give every layer a name of its own");
            }
            let mut made = BTreeSet::new();
            for (number, operator) in layer.operators.iter().enumerate() {
                let name = &*operator.makes;
                if [PIXELS, TOKENS, CONTINUATION].contains(&name) {
                    let what = format!("'{name}' is what samples give");
                    self.say(at, Some(number), what, "give the result another name");
                }
                if !name.is_empty() && !made.insert(name) {
                    let what = format!("two operators of layer '{}' make '{name}'", layer.name);
                    self.say(at, Some(number), what, "give every result a name of its own");
                }
            }
        }
        if self.network.layers.iter().map(|layer| layer.repeat).sum::<u64>() < 2 {
            let what = "the graph has fewer than two layers".to_owned();
            self.say(0, None, what, "let the first read the samples, and the last have the loss");
        }
    }

    /// Checks the operators of a layer; returns false if shapes are unknown from here on.
    fn layer(
        &mut self,
        at: usize,
        layer: &'a Layer,
        shapes: &mut BTreeMap<&'a str, Shape>,
    ) -> bool {
        for (number, operator) in layer.operators.iter().enumerate() {
            let unknown: Vec<&String> =
                operator.reads.iter().filter(|name| !shapes.contains_key(&***name)).collect();
            for name in &unknown {
                let (what, remedy) = self.unmade(layer, number, name);
                self.say(at, Some(number), what, &remedy);
            }
            if !unknown.is_empty() {
                return false;
            }
            if operator.op == Op::Concat && operator.reads.iter().any(|name| name == PIXELS) {
                let what = format!("'{}' puts pixels beside other tensors", operator.makes);
                self.say(at, Some(number), what, "scale the pixels first, or pass them a `linear`");
            }
            let reads: Vec<Shape> = operator.reads.iter().map(|name| shapes[&**name]).collect();
            match shapes::of(&operator.op, &reads, &self.network.input) {
                Ok(Some(shape)) => {
                    shapes.insert(&operator.makes, shape);
                }
                Ok(None) => {}
                Err((what, remedy)) => {
                    let made = match &*operator.makes {
                        "" => "the loss".to_owned(),
                        name => format!("'{name}'"),
                    };
                    self.say(at, Some(number), format!("{made}: {what}"), &remedy);
                    return false;
                }
            }
            self.attention(at, layer, number);
        }
        true
    }

    /// Problem and remedy of a tensor that is read before it is made, or never made.
    fn unmade(&self, layer: &Layer, number: usize, name: &str) -> (String, String) {
        let reader = &layer.operators[number];
        let maker = |name: &str| layer.operators.iter().find(|operator| operator.makes == name);
        // Does `name` need the result of the operator that reads it?
        let (mut path, mut seen) = (vec![name], BTreeSet::new());
        while let Some(next) = path.pop() {
            if next == reader.makes && maker(name).is_some() {
                let what = format!("'{}' and '{name}' need each other: a cycle", reader.makes);
                return (what, "a graph has no cycles; read a tensor that is made before".into());
            }
            if seen.insert(next) {
                let reads = maker(next).map(|operator| &operator.reads[..]).unwrap_or_default();
                path.extend(reads.iter().map(String::as_str));
            }
        }
        let later = |layer: &Layer| layer.operators.iter().any(|op| op.makes == name);
        if self.network.layers.iter().any(later) {
            let what = format!("'{}' reads '{name}', which is made later", reader.makes);
            return (what, "list operators in the order of their results".into());
        }
        let given = self.network.input.tensors().into_iter().map(|(name, _)| name);
        let made = self.network.layers.iter().flat_map(|layer| &layer.operators);
        let made = made.map(|operator| &*operator.makes).filter(|name| !name.is_empty());
        let known: Vec<&str> = given.chain(made).collect();
        (format!("nothing makes '{name}'"), meant(name, &known))
    }

    /// Attention reads what matrices of its layer made for it alone, and only matrices of its layer
    /// read it: that is how tensor parallelism divides its heads.
    fn attention(&mut self, at: usize, layer: &Layer, number: usize) {
        let operator = &layer.operators[number];
        if !matches!(operator.op, Op::Attention { .. }) {
            return;
        }
        for name in &operator.reads {
            let maker = layer.operators[..number].iter().rfind(|op| op.makes == *name);
            let own = maker.is_some_and(|maker| matches!(maker.op, Op::Linear { .. }));
            let readers = layer.operators.iter().filter(|op| op.reads.contains(name)).count();
            if !own || readers > 1 {
                let what = format!("attention reads '{name}'");
                let remedy = "let it read what a `linear` of the same layer makes for it alone";
                self.say(at, Some(number), what, remedy);
            }
        }
        let mut readers = layer.operators.iter().filter(|op| op.reads.contains(&operator.makes));
        if readers.clone().count() == 0
            || !readers.all(|reader| matches!(reader.op, Op::Linear { .. }))
        {
            let what =
                format!("the result of attention, '{}', is not read by `linear`s", operator.makes);
            let remedy = "project it with a `linear` of the same layer";
            self.say(at, Some(number), what, remedy);
        }
    }

    /// One loss, at the end of the last layer; nothing is made in vain.
    fn losses(&mut self) {
        let mut losses = Vec::new();
        for (at, layer) in self.network.layers.iter().enumerate() {
            for (number, operator) in layer.operators.iter().enumerate() {
                if operator.op == Op::CrossEntropy {
                    losses.push((at, number));
                }
            }
        }
        let last = self.network.layers.len().saturating_sub(1);
        if losses.is_empty() {
            let what = "the graph has no loss".to_owned();
            let remedy = "end with { op = \"cross_entropy\", reads = [\"logits\"] }";
            self.say(last, None, what, remedy);
        }
        for (position, &(at, number)) in losses.iter().enumerate() {
            if at != last || position > 0 || self.network.layers[at].repeat > 1 {
                let what = "a loss that is not the only one, in the last layer".to_owned();
                self.say(at, Some(number), what, "leave it out, or make its layer the last one");
            }
        }
        for (at, layer) in self.network.layers.iter().enumerate() {
            for (number, operator) in layer.operators.iter().enumerate() {
                let name = &operator.makes;
                let read = |op: &Operator| op.reads.contains(name);
                let here = &layer.operators[number + 1..];
                let again = if layer.repeat > 1 { &layer.operators[..] } else { &[] };
                let mut later =
                    self.network.layers[at + 1..].iter().flat_map(|layer| &layer.operators);
                if !name.is_empty() && !here.iter().chain(again).any(read) && !later.any(read) {
                    let what = format!("nothing reads '{name}'");
                    self.say(at, Some(number), what, "leave the operator out");
                }
            }
        }
        let blind = self.network.plain().into_iter().enumerate().skip(1);
        let blind = blind.filter(|(_, layer)| layer.enters.is_empty());
        for (_, layer) in blind.collect::<Vec<_>>() {
            let what = format!("layer '{}' reads nothing of the layers before it", layer.name);
            self.say(layer.of, None, what, "leave the layers before it out");
        }
        for layer in self.network.plain().iter().skip(1) {
            let pixels = |op: &Operator| op.reads.iter().any(|name| name == PIXELS);
            if layer.operators.iter().any(pixels) {
                let what = format!("layer '{}' reads the pixels", layer.name);
                let remedy = "only the first layer can; let it pass on what later ones need";
                self.say(layer.of, None, what, remedy);
            }
            if layer.enters.len() > shapes::PARTS {
                let what = format!("{} tensors enter layer '{}'", layer.enters.len(), layer.name);
                self.say(
                    layer.of,
                    None,
                    what,
                    "use more operators and fewer layers: at most 16 may",
                );
            }
        }
    }
}
