use super::*;
use crate::graph::LinearRole;
use crate::model::built_in;

fn network(name: &str) -> (Model, Network) {
    let model = built_in::get(name).unwrap().unwrap_or_else(|errors| panic!("{errors}"));
    let Body::Network(network) = model.body() else { panic!("a described network") };
    (model.clone(), network.clone())
}

#[test]
fn parameters_are_counted() {
    // 784·10 + 10.
    assert_eq!(network("softmax-digits").0.parameters(), 7_850);
    // torchvision's vgg16_bn has 138,365,992, of which 4,224 are biases of convolutions.
    assert_eq!(network("vgg16").0.parameters(), 138_365_992 - 4_224);
}

#[test]
fn files_are_read_back() {
    for name in ["softmax-digits", "two-tower", "encoder-decoder", "vgg16"] {
        let (model, _) = network(name);
        assert_eq!(Model::parse(&model.to_toml(), "x.toml").unwrap(), model);
    }
}

#[test]
fn what_crosses_a_boundary_follows_from_what_is_read() {
    let (_, towers) = network("two-tower");
    let plain = towers.plain();
    let names = |tensors: &[(String, Shape)]| {
        tensors.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(plain.len(), 4);
    assert_eq!(names(&plain[0].enters), [""; 0]);
    assert!(plain[..3].iter().all(|layer| names(&layer.leaves) == ["a", "b"]));
    let (_, transformer) = network("encoder-decoder");
    let plain = transformer.plain();
    let entering: Vec<Vec<String>> = plain.iter().map(|layer| names(&layer.enters)).collect();
    assert_eq!(entering[3], ["memory"]);
    // Decoders pass the encoder's result on; the last one does not.
    assert_eq!((&entering[4], &entering[5]), (&entering[4], &entering[4]));
    assert_eq!(entering[5], ["h", "memory"]);
    assert_eq!(entering[6], ["h"]);
    assert_eq!(transformer.lookahead(32), 32);
}

#[test]
fn matrices_are_divided_as_their_readers_allow() {
    let (_, towers) = network("two-tower");
    let plain = towers.plain();
    let of = |layer: &PlainLayer<'_>, name: &str| {
        let at = layer.operators.iter().position(|operator| operator.makes == name).unwrap();
        roles(layer.operators, &layer.leaves)[at]
    };
    // What leaves a layer is whole.
    assert_eq!(of(&plain[0], "a1"), LinearRole::Join);
    assert_eq!(
        (of(&plain[1], "a_up"), of(&plain[1], "a_down")),
        (LinearRole::Up, LinearRole::Down)
    );
    assert_eq!(of(&plain[3], "logits"), LinearRole::Head);
    let (_, transformer) = network("encoder-decoder");
    let plain = transformer.plain();
    let decoder = &plain[4];
    assert_eq!(
        (of(decoder, "c_k"), of(decoder, "c_o")),
        (LinearRole::Qkv, LinearRole::AttentionOut)
    );
    assert_eq!((of(decoder, "d_up"), of(decoder, "d_down")), (LinearRole::Up, LinearRole::Down));
}

const HEAD: &str = "kind = \"graph\"\n[input]\ndata = \"digits\"\n";

/// Problems of layers with these operators.
fn told(layers: &[&str]) -> String {
    let mut text = HEAD.to_owned();
    for (number, operators) in layers.iter().enumerate() {
        text += &format!("[[layer]]\nname = \"l{number}\"\noperators = [\n{operators}]\n");
    }
    Model::parse(&text, "g.toml").unwrap_err().to_string()
}

const X: &str = "{ op = \"scale\", reads = \"pixels\", makes = \"x\", factor = 2 },\n";
const END: &str = "{ op = \"linear\", reads = \"x\", makes = \"z\", width = 10 },\n\
                   { op = \"cross_entropy\", reads = \"z\" },\n";

#[test]
fn a_cycle_is_told_with_its_line() {
    let cycle = "{ op = \"add\", reads = [\"x\", \"b\"], makes = \"a\" },\n\
                 { op = \"relu\", reads = \"a\", makes = \"b\" },\n";
    let told = told(&[X, cycle, END]);
    assert!(told.starts_with("g.toml:12: 'a' and 'b' need each other: a cycle"), "{told}");
}

#[test]
fn operators_out_of_order_and_names_that_nothing_makes_are_told() {
    let late = "{ op = \"relu\", reads = \"y\", makes = \"z\" },\n\
                { op = \"relu\", reads = \"x\", makes = \"y\" },\n";
    let late = told(&[X, late, END]);
    assert!(late.starts_with("g.toml:12: 'z' reads 'y', which is made later"), "{late}");
    let absent = told(&["{ op = \"relu\", reads = \"pixel\", makes = \"x\" },\n", END]);
    assert!(absent.contains("g.toml:7: nothing makes 'pixel'; did you mean `pixels`?"), "{absent}");
}

#[test]
fn shapes_that_do_not_fit_are_told() {
    let sum = "{ op = \"linear\", reads = \"x\", makes = \"y\", width = 7 },\n\
               { op = \"add\", reads = [\"x\", \"y\"], makes = \"w\" },\n";
    let sum = told(&[X, sum, END]);
    assert!(sum.contains("g.toml:13: 'w': its operands have widths 784 and 7"), "{sum}");
    let narrow = told(&[X, "{ op = \"cross_entropy\", reads = \"x\" },\n"]);
    assert!(narrow.contains("g.toml:12: the loss: logits of width 784 for 10 classes"), "{narrow}");
    let beyond =
        "{ op = \"slice\", reads = \"pixels\", makes = \"x\", first = 700, width = 100 },\n";
    let beyond = told(&[beyond, END]);
    assert!(beyond.contains("columns 700 to 800 of a tensor of width 784"), "{beyond}");
    let flat = "{ op = \"linear\", reads = \"x\", makes = \"y\", width = 8 },\n\
                { op = \"conv\", reads = \"y\", makes = \"w\", filters = 3 },\n";
    assert!(told(&[X, flat, END]).contains("g.toml:13: 'w': operand 1 is no images"));
    let heads = "{ op = \"embedding\", reads = \"x\", makes = \"w\", width = 3 },\n";
    assert!(told(&[X, heads, END]).contains("operand 1 is numbers; read `tokens`"));
}

#[test]
fn unknown_operators_and_keys_are_told() {
    let unknown = told(&["{ op = \"relo\", reads = \"pixels\", makes = \"x\" },\n", END]);
    assert!(unknown.contains("g.toml:7: layer 1, operator 1: there is no operator \"relo\""));
    assert!(unknown.contains("did you mean `relu`?"), "{unknown}");
    let key = "{ op = \"linear\", reads = \"pixels\", makes = \"x\", width = 8, heads = 2 },\n";
    let key = told(&[key, END]);
    assert!(key.contains("unknown key 'heads'"), "{key}");
    let width =
        told(&["{ op = \"linear\", reads = \"pixels\", makes = \"x\", width = 0 },\n", END]);
    assert!(width.contains("`width` is 0; use a whole number from 1 to"), "{width}");
}

#[test]
fn a_graph_needs_one_loss_and_no_idle_operator() {
    let none = told(&[X, "{ op = \"relu\", reads = \"x\", makes = \"y\" },\n"]);
    assert!(none.contains("the graph has no loss; end with { op = \"cross_entropy\""), "{none}");
    assert!(none.contains("g.toml:12: nothing reads 'y'"), "{none}");
    let two = told(&[&(X.to_owned() + END), END]);
    assert!(two.contains("a loss that is not the only one, in the last layer"), "{two}");
    let one = told(&[&(X.to_owned() + END)]);
    assert!(one.contains("the graph has fewer than two layers"), "{one}");
    let text = "kind = \"graph\"\n";
    let empty = Model::parse(text, "g.toml").unwrap_err().to_string();
    assert!(empty.contains("g.toml:1: the graph has no [input]"), "{empty}");
    assert!(empty.contains("g.toml:1: the graph has no [[layer]]"), "{empty}");
}

#[test]
fn attention_reads_matrices_of_its_own() {
    let text = built_in::all().iter().find(|(name, _)| *name == "encoder-decoder").unwrap().1;
    let shared =
        text.replace("reads = [\"e_q\", \"e_k\", \"e_v\"]", "reads = [\"e_q\", \"e_n\", \"e_v\"]");
    let told = Model::parse(&shared, "g.toml").unwrap_err().to_string();
    assert!(told.contains("attention reads 'e_n'; let it read what a `linear`"), "{told}");
    let odd = text.replace("makes = \"e_seen\", heads = 4", "makes = \"e_seen\", heads = 5");
    let told = Model::parse(&odd, "g.toml").unwrap_err().to_string();
    assert!(told.contains("queries of width 64 do not split into 5 heads"), "{told}");
}
