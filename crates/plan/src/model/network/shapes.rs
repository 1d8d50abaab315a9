//! Shape of an operator's result, from those of its operands.

use super::{Input, Op, Shape};
use crate::graph::Window;

/// Most tensors that one operator puts beside each other.
pub(super) const PARTS: usize = 16;

/// Shape of the result; `None` for a loss. An error says what does not fit, and what would.
pub(super) fn of(
    op: &Op,
    reads: &[Shape],
    input: &Input,
) -> Result<Option<Shape>, (String, String)> {
    let wanted = match op {
        Op::Add => 2..=2,
        Op::Attention { .. } => 3..=3,
        Op::Concat => 2..=PARTS,
        _ => 1..=1,
    };
    if !wanted.contains(&reads.len()) {
        let (least, most) = (wanted.start(), wanted.end());
        let number = if least == most { least.to_string() } else { format!("{least} to {most}") };
        return Err((
            format!("it reads {} tensors", reads.len()),
            format!("give `reads` {number}"),
        ));
    }
    let ids = matches!(op, Op::Embedding { .. });
    if let Some(at) = reads.iter().position(|shape| shape.ids != ids) {
        let (is, remedy) = match ids {
            true => ("numbers", "read `tokens` or `continuation`"),
            false => ("ids of tokens", "look them up with an `embedding` first"),
        };
        return Err((format!("operand {} is {is}", at + 1), remedy.to_owned()));
    }
    let x = reads[0];
    let rows = |width: u64| Ok(Some(Shape { width, image: None, ids: false }));
    let images = |side: u64, channels: u64| {
        let (width, image) = (side * side * channels, Some((side, channels)));
        Ok(Some(Shape { width, image, ids: false }))
    };
    let image = || {
        x.image.ok_or_else(|| {
            let what = "operand 1 is no images".to_owned();
            (what, "read `pixels`, or the result of `conv`, `max_pool` or `batch_norm`".to_owned())
        })
    };
    let tokens = || match input {
        Input::Tokens { .. } => Ok(()),
        Input::Digits | Input::Images { .. } => Err((
            "samples have no positions".to_owned(),
            "use it in a network that reads tokens".to_owned(),
        )),
    };
    match *op {
        Op::Linear { width, .. } => rows(width),
        Op::Activation { .. } | Op::Scale { .. } => Ok(Some(x)),
        Op::Norm { .. } => Ok(Some(x)),
        Op::Position => tokens().map(|()| Some(x)),
        Op::Add if reads[0].width != reads[1].width => Err((
            format!("its operands have widths {} and {}", reads[0].width, reads[1].width),
            "add tensors of one width; a `linear` changes a width".to_owned(),
        )),
        Op::Add => Ok(Some(Shape { image: reads[0].image.filter(|_| reads[0] == reads[1]), ..x })),
        Op::Concat => rows(reads.iter().map(|shape| shape.width).sum()),
        Op::Slice { first, width } if first.saturating_add(width) > x.width => Err((
            format!("columns {first} to {} of a tensor of width {}", first + width, x.width),
            format!("end at {} at most", x.width),
        )),
        Op::Slice { width, .. } => rows(width),
        Op::Embedding { width, .. } => rows(width),
        Op::Attention { heads, kv_heads, .. } => {
            tokens()?;
            let [q, k, v] = [reads[0].width, reads[1].width, reads[2].width];
            let head = q / heads;
            if !q.is_multiple_of(heads) || !heads.is_multiple_of(kv_heads) {
                let what = format!(
                    "queries of width {q} do not split into {heads} heads for {kv_heads} of keys"
                );
                return Err((what, "choose `heads` and `kv_heads` that divide".to_owned()));
            }
            if [k, v] != [kv_heads * head; 2] {
                let what = format!("keys and values have widths {k} and {v}");
                let remedy = format!(
                    "{kv_heads} heads as wide as those of the queries need {}",
                    kv_heads * head
                );
                return Err((what, remedy));
            }
            rows(q)
        }
        Op::Conv { filters, kernel, stride } => {
            images(side_out(image()?, kernel, stride)?, filters)
        }
        Op::MaxPool { kernel, stride } => {
            let image = image()?;
            images(side_out(image, kernel, stride)?, image.1)
        }
        Op::BatchNorm { .. } => image().map(|_| Some(x)),
        Op::AveragePool => image().and_then(|(_, channels)| rows(channels)),
        Op::CrossEntropy if x.width != input.classes() => Err((
            format!("logits of width {} for {} classes", x.width, input.classes()),
            format!("end with a `linear` of width {}", input.classes()),
        )),
        Op::CrossEntropy => Ok(None),
    }
}

/// Pixels of padding around an image: half of an odd window, none for an even one.
const fn padding(kernel: u64) -> u64 {
    if kernel.is_multiple_of(2) { 0 } else { kernel / 2 }
}

/// Windows of an operator on images, centred: odd ones are padded, so that stride 1 keeps the side.
pub(crate) fn window((side, channels): (u64, u64), kernel: u64, stride: u64) -> Window {
    Window { side, channels, kernel, stride, padding: padding(kernel) }
}

/// Pixels along each side of a window operator's result.
fn side_out(image: (u64, u64), kernel: u64, stride: u64) -> Result<u64, (String, String)> {
    let (side, _) = image;
    match kernel <= side + 2 * padding(kernel) && stride >= 1 {
        true => Ok(window(image, kernel, stride).side_out()),
        false => Err((
            format!("windows of {kernel} pixels on images of {side}"),
            format!("use a kernel of at most {side}"),
        )),
    }
}
