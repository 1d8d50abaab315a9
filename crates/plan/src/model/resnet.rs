//! Residual networks on images (He et al., "Deep residual learning for image recognition", arXiv
//! 1512.03385): sizes of the blocks, and parameter counts.

use super::fields::Fields;
use super::{Activation, Body, Experts, Latent, MAX_PARAMETERS, Model, ModelDims, ModelKind};
use crate::located::{Errors, Value};
use serde::Serialize;

/// Dimensions of a residual network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ResNet {
    /// Pixels along each side of an image.
    pub image: u64,
    /// Number of channels per pixel.
    pub channels: u64,
    /// Number of image classes.
    pub classes: u64,
    /// Blocks of each stage; every stage after the first halves the sides and doubles the width.
    pub blocks: Vec<u64>,
    /// Number of channels of the first stage.
    pub width: u64,
    /// True if a block is three convolutions with a narrow middle instead of two, and its output
    /// four times as wide as that middle.
    pub bottleneck: bool,
    /// Layers before the blocks.
    pub stem: Stem,
}

/// Layers before the blocks of a residual network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// A 7 × 7 convolution with stride 2 and a 3 × 3 max pool with stride 2 (table 1 of the paper),
    /// for images of a few hundred pixels.
    Large,
    /// A 3 × 3 convolution (section 4.2 of the paper), for images of a few tens of pixels.
    Small,
}

/// One block of a residual network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Index of its stage, from 0.
    pub stage: usize,
    /// Pixels along each side of the input.
    pub side: u64,
    /// Number of input channels.
    pub inputs: u64,
    /// Number of channels of the middle.
    pub width: u64,
    /// Number of output channels.
    pub outputs: u64,
    /// Factor by which the sides shrink.
    pub stride: u64,
}

impl Block {
    /// Pixels along each side of the output.
    pub const fn side_out(&self) -> u64 {
        self.side.div_ceil(self.stride)
    }

    /// Returns true if the input must be projected before it is added to the output.
    pub const fn projects(&self) -> bool {
        self.stride > 1 || self.inputs != self.outputs
    }
}

impl ResNet {
    /// Ratio of a block's output width to the width of its middle.
    pub const fn expansion(&self) -> u64 {
        if self.bottleneck { 4 } else { 1 }
    }

    /// Pixels along each side of the stem's output.
    pub const fn side_after_stem(&self) -> u64 {
        match self.stem {
            Stem::Large => self.image.div_ceil(2).div_ceil(2),
            Stem::Small => self.image,
        }
    }

    /// All blocks, in order.
    pub fn all_blocks(&self) -> Vec<Block> {
        let (mut side, mut inputs) = (self.side_after_stem(), self.width);
        let mut all = Vec::new();
        for (stage, &count) in self.blocks.iter().enumerate() {
            let width = self.width << stage;
            for at in 0..count {
                let stride = if at == 0 && stage > 0 { 2 } else { 1 };
                let outputs = width * self.expansion();
                let block = Block { stage, side, inputs, width, outputs, stride };
                (side, inputs) = (block.side_out(), outputs);
                all.push(block);
            }
        }
        all
    }

    /// Number of channels after the last block.
    pub fn features(&self) -> u64 {
        (self.width << self.blocks.len().saturating_sub(1)) * self.expansion()
    }

    /// Trained parameters: convolutions without bias, gain and bias of every norm, and the head.
    pub(super) fn count(&self) -> u128 {
        let conv = |kernel: u64, inputs: u64, outputs: u64| {
            let weights = u128::from(kernel * kernel) * u128::from(inputs) * u128::from(outputs);
            weights + 2 * u128::from(outputs)
        };
        let stem = match self.stem {
            Stem::Large => conv(7, self.channels, self.width),
            Stem::Small => conv(3, self.channels, self.width),
        };
        let block = |b: &Block| {
            let main = if self.bottleneck {
                conv(1, b.inputs, b.width) + conv(3, b.width, b.width) + conv(1, b.width, b.outputs)
            } else {
                conv(3, b.inputs, b.width) + conv(3, b.width, b.outputs)
            };
            main + if b.projects() { conv(1, b.inputs, b.outputs) } else { 0 }
        };
        let blocks: u128 = self.all_blocks().iter().map(block).sum();
        stem + blocks + (u128::from(self.features()) + 1) * u128::from(self.classes)
    }

    /// Largest activation of one image, in elements.
    pub(crate) fn largest_activation(&self) -> u64 {
        let stem_side = match self.stem {
            Stem::Large => self.image.div_ceil(2),
            Stem::Small => self.image,
        };
        let stem = stem_side * stem_side * self.width;
        let block = |b: &Block| {
            let (side, out) = (b.side, b.side_out());
            (side * side * b.inputs.max(b.width)).max(out * out * b.outputs)
        };
        let blocks = self.all_blocks().iter().map(block).max().unwrap_or(0);
        stem.max(blocks).max(self.image * self.image * self.channels)
    }
}

/// Maximum number of stages, blocks per stage, pixels along a side, channels and classes: far above
/// trained networks, and low enough that no product of them overflows.
const STAGES: usize = 8;
const BLOCKS: u64 = 1024;
const SIDE: u64 = 1 << 14;
const WIDTH: u64 = 1 << 14;
const CLASSES: u64 = 1 << 24;

const KEYS: [&str; 9] =
    ["name", "kind", "image", "channels", "classes", "blocks", "width", "bottleneck", "stem"];

/// Reads a model file of kind `resnet`.
pub(super) fn parse(fields: &mut Fields) -> Body {
    let image = fields.whole("image", 1..=SIDE, "224", None);
    let channels = fields.whole("channels", 1..=WIDTH, "3", Some(3));
    let classes = fields.whole("classes", 1..=CLASSES, "1000", None);
    let blocks = fields.list("blocks", 1..=STAGES, 1..=BLOCKS, "[3, 4, 6, 3]");
    let width = fields.whole("width", 1..=WIDTH, "64", Some(64));
    let bottleneck = fields
        .read("bottleneck", Value::flag, || "use true or false".to_owned())
        .flatten()
        .unwrap_or(true);
    let stem = match fields.word("stem", &["large", "small"]) {
        Some("small") => Stem::Small,
        _ => Stem::Large,
    };
    fields.refuse_unknown(ModelKind::Resnet, &KEYS);
    Body::Images(ResNet { image, channels, classes, blocks, width, bottleneck, stem })
}

/// Model file of a residual network, without its name and kind.
pub(super) fn to_toml(net: &ResNet) -> String {
    let stem = match net.stem {
        Stem::Large => "large",
        Stem::Small => "small",
    };
    format!(
        "image = {}\nchannels = {}\nclasses = {}\nblocks = {:?}\nwidth = {}\nbottleneck = {}\nstem = \
         \"{stem}\"\n",
        net.image, net.channels, net.classes, net.blocks, net.width, net.bottleneck
    )
}

impl Model {
    /// Builds a residual network; an error if it has too many parameters.
    pub fn resnet(name: impl Into<String>, net: ResNet) -> Result<Self, Errors> {
        Self::from_body(name.into(), Body::Images(net))
    }
}

/// Generic dimensions of a residual network: one image is one token of a sample of one, and the
/// classes are its vocabulary.
pub(super) fn shape(net: &ResNet) -> ModelDims {
    ModelDims {
        kind: ModelKind::Resnet,
        layers: net.blocks.iter().sum(),
        d_model: net.features(),
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        seq: 1,
        max_positions: 0,
        vocab: net.classes,
        tied: false,
        activation: Activation::Relu,
        norm_eps: 1e-5,
        rope_theta: 0.0,
        qk_norm: false,
        experts: Experts::default(),
        latent: Latent::default(),
        mtp: Default::default(),
    }
}

/// Problem and remedy if a dimension or the parameter count is out of range.
pub(super) fn too_large(net: &ResNet) -> Option<(String, String)> {
    let sound = net.blocks.len() <= STAGES
        && !net.blocks.is_empty()
        && net.blocks.iter().all(|b| (1..=BLOCKS).contains(b))
        && (1..=SIDE).contains(&net.image)
        && (1..=WIDTH).contains(&net.channels)
        && (1..=WIDTH).contains(&net.width)
        && (1..=CLASSES).contains(&net.classes);
    if !sound {
        let problem = "a number of the network is out of range".to_owned();
        let remedy = format!(
            "use 1 to {STAGES} stages of 1 to {BLOCKS} blocks, sides of 1 to {SIDE} pixels, 1 to \
             {WIDTH} channels and 1 to {CLASSES} classes"
        );
        return Some((problem, remedy));
    }
    let count = net.count();
    (count > u128::from(MAX_PARAMETERS)).then(|| {
        (
            format!("the model would have {:.1e} parameters", count as f64),
            "lower `width` or `blocks`".to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::built_in;

    fn network(name: &str) -> Model {
        built_in::get(name).unwrap().unwrap_or_else(|errors| panic!("{errors}"))
    }

    /// Counts of torchvision's models of the same names.
    #[test]
    fn published_networks_have_their_published_parameters() {
        assert_eq!(network("resnet18").parameters(), 11_689_512);
        assert_eq!(network("resnet50").parameters(), 25_557_032);
    }

    #[test]
    fn sides_halve_and_widths_double() {
        let model = network("resnet50");
        let Body::Images(net) = model.body() else { panic!("a network on images") };
        let blocks = net.all_blocks();
        assert_eq!(blocks.len(), 16);
        let last = blocks[15];
        assert_eq!((last.side, last.inputs, last.width, last.outputs), (7, 2048, 512, 2048));
        assert_eq!((blocks[0].side, blocks[0].inputs, blocks[0].stride), (56, 64, 1));
        assert!(blocks[0].projects() && !blocks[1].projects() && blocks[3].projects());
        assert_eq!(net.features(), 2048);
        assert_eq!(net.largest_activation(), 112 * 112 * 64);
    }

    #[test]
    fn files_are_read_back_and_their_slips_are_told_at_once() {
        for name in ["resnet-mini", "resnet18", "resnet50"] {
            let model = network(name);
            assert_eq!(Model::parse(&model.to_toml(), "x.toml").unwrap(), model);
        }
        let text =
            "kind = \"resnet\"\nimage = 0\nblocks = [2, \"a\"]\nwidht = 3\nstem = \"tiny\"\n";
        let told = Model::parse(text, "r.toml").unwrap_err().to_string();
        let expected = [
            "r.toml:1: `classes` is missing; add a line such as `classes = 1000`",
            "r.toml:2: `image` is 0; use a whole number from 1 to 16384",
            "r.toml:3: `blocks` is a list; use 1 to 8 whole numbers from 1 to 1024 such as \
             [3, 4, 6, 3]",
            "r.toml:4: \"widht\" is not a key of a model file; did you mean `width`?",
            "r.toml:5: `stem` is \"tiny\"; use \"large\" or \"small\"",
        ];
        assert_eq!(told.lines().collect::<Vec<_>>(), expected);
        let net = ResNet {
            image: 8,
            channels: 3,
            classes: 2,
            blocks: vec![0],
            width: 4,
            bottleneck: false,
            stem: Stem::Small,
        };
        let told = Model::resnet("none", net).unwrap_err().to_string();
        assert!(told.contains("out of range"), "{told}");
    }
}
