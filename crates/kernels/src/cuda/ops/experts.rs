//! Experts: routing, dispatch, products of each expert's rows, and combination.

use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Routing, Source};
use super::super::product::{Operands, Pass, Product};
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::experts::{product, route};
use crate::{Rows, Write};

/// Operands of a dispatch of tokens to experts.
#[derive(Clone, Copy, Debug)]
pub struct DispatchAt {
    /// Tokens.
    pub x: Span,
    /// Chosen experts, `[tokens, topk]`.
    pub choices: Span,
    /// Experts' rows.
    pub rows: Span,
    /// Row of every choice.
    pub slots: Span,
    /// Tokens of every expert.
    pub counts: Span,
}

/// Sizes of a dispatch.
#[derive(Clone, Copy, Debug)]
pub struct DispatchShape {
    /// Tokens.
    pub tokens: Rows,
    /// Experts of a token.
    pub topk: usize,
    /// Experts.
    pub experts: usize,
    /// Regions of rows, each for an equal number of experts.
    pub regions: usize,
    /// All experts' rows.
    pub slots: usize,
}

/// Choices of a tile, as in the kernels.
const TILE: u32 = 1024;
/// Experts for which the kernels have shared memory.
const MOST: u64 = 256;

fn routing_of(routing: route::Routing, loss_scale: f32) -> Routing {
    let route::Routing { experts, topk, seq, groups, kept_groups, parts, .. } = routing;
    let [experts, topk, seq, groups, kept_groups, parts] =
        [experts, topk, seq, groups, kept_groups, parts].map(word);
    Routing {
        experts,
        topk,
        sigmoid: routing.sigmoid.into(),
        seq,
        capacity: routing.capacity.map_or(0, word),
        groups,
        kept_groups,
        parts,
        scale: routing.scale,
        balance: routing.balance * loss_scale,
    }
}

impl Device {
    /// Returns true if tokens can be routed to a number of experts in a number of groups.
    pub const fn has_routing(experts: u64, groups: u64) -> bool {
        experts <= MOST && groups <= 32
    }

    /// Queues the choice of experts of whole sequences; returns the addresses of the choices, of the
    /// counts by sequence and of the numbers of dropped choices.
    fn choose(
        &mut self,
        stream: Stream,
        element: ElementType,
        (routing, rows): (Routing, u32),
        (logits, bias): (Span, Option<Span>),
    ) -> Result<[u64; 3], CudaError> {
        let Routing { experts, topk, seq, .. } = routing;
        let of_logits = u64::from(rows) * u64::from(experts);
        let logits = self.of("the affinities", logits, of_logits, element)?;
        let bias =
            bias.map_or(Ok(0), |bias| self.of("the bias", bias, u64::from(experts), element))?;
        let sequences = rows / seq.max(1);
        let sizes = [rows * topk, sequences * experts, sequences].map(|n| 4 * u64::from(n));
        let [chosen, counts, lost] = self.scratch(stream, sizes)?;
        let grid = Grid { blocks: (rows.div_ceil(8), 1), threads: 256, shared: 8 * 4 * experts };
        let args = [
            Arg::At(logits),
            Arg::At(bias),
            Arg::At(chosen),
            Arg::Routing(routing),
            Arg::Word(rows),
        ];
        let source = |name| (Source::Experts, element, name);
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, source("choose_experts"), grid, &args) }?;
        let args = [Arg::At(chosen), Arg::At(counts), Arg::At(lost), Arg::Routing(routing)];
        // SAFETY: as above.
        unsafe { self.launch(stream, source("count_and_drop"), Grid::of(sequences, 1024), &args) }?;
        Ok([chosen, counts, lost])
    }

    /// Choices and gates of all tokens of whole sequences; the number of dropped choices is added to
    /// `dropped`.
    pub fn route(
        &mut self,
        stream: Stream,
        element: ElementType,
        (routing, rows): (route::Routing, usize),
        (logits, bias): (Span, Option<Span>),
        (choices, gates, dropped): (Span, Span, Option<(Span, Write)>),
    ) -> Result<(), CudaError> {
        let (routing, rows) = (routing_of(routing, 1.0), word(rows));
        let [chosen, _, lost] = self.choose(stream, element, (routing, rows), (logits, bias))?;
        let all = u64::from(rows) * u64::from(routing.topk);
        let of_logits = u64::from(rows) * u64::from(routing.experts);
        let args = [
            Arg::At(self.of("the affinities", logits, of_logits, element)?),
            Arg::At(chosen),
            Arg::At(self.of("the choices", choices, all, ElementType::F32)?),
            Arg::At(self.of("the gates", gates, all, ElementType::F32)?),
            Arg::Routing(routing),
            Arg::Word(rows),
            Arg::Word(0),
            Arg::Word(rows),
        ];
        let source = |name| (Source::Experts, element, name);
        let grid = Grid::of(rows.div_ceil(8), 256);
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, source("gate_weights"), grid, &args) }?;
        let Some((dropped, mode)) = dropped else { return Ok(()) };
        let args = [
            Arg::At(lost),
            Arg::At(self.of("the dropped choices", dropped, 1, ElementType::F32)?),
            Arg::Word(rows / routing.seq.max(1)),
            Arg::Word(fresh(mode)),
        ];
        // SAFETY: as above.
        unsafe { self.launch(stream, source("add_dropped"), Grid::of(1, 32), &args) }
    }

    /// Gradient of the affinities, with that of the balancing loss times `loss_scale`.
    pub fn route_gradient(
        &mut self,
        stream: Stream,
        element: ElementType,
        (routing, rows, loss_scale): (route::Routing, usize, f32),
        (logits, bias): (Span, Option<Span>),
        (dgates, dlogits): (Span, Span),
    ) -> Result<(), CudaError> {
        let (routing, rows) = (routing_of(routing, loss_scale), word(rows));
        let [chosen, counts, _] = self.choose(stream, element, (routing, rows), (logits, bias))?;
        let of_logits = u64::from(rows) * u64::from(routing.experts);
        let all = u64::from(rows) * u64::from(routing.topk);
        let args = [
            Arg::At(self.of("the gates' gradient", dgates, all, ElementType::F32)?),
            Arg::At(self.of("the affinities", logits, of_logits, element)?),
            Arg::At(chosen),
            Arg::At(counts),
            Arg::At(self.of("their gradient", dlogits, of_logits, element)?),
            Arg::Routing(routing),
            Arg::Word(rows),
            Arg::Word(0),
            Arg::Word(rows),
            Arg::At(0),
        ];
        let kernel = (Source::Experts, element, "route_gradient");
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, kernel, Grid::of(rows.div_ceil(8), 256), &args) }
    }

    /// Excess of each expert's choices over an equal share, times `factor`, in f32.
    pub fn router_bias(
        &mut self,
        stream: Stream,
        (choices, dbias): (Span, Span),
        factor: f32,
        mode: Write,
    ) -> Result<(), CudaError> {
        let (n, experts) = (word((choices.len / 4) as usize), word((dbias.len / 4) as usize));
        let at = self.of("the choices", choices, u64::from(n), ElementType::F32)?;
        let dbias = self.of("the bias's gradient", dbias, u64::from(experts), ElementType::F32)?;
        let tiles = n.div_ceil(TILE);
        let sizes = [u64::from(tiles) * u64::from(experts) * 4, u64::from(experts) * 4, 4];
        let [tile, counts, over] = self.scratch(stream, sizes)?;
        let source = |name| (Source::Experts, ElementType::F32, name);
        let small = |blocks| Grid { blocks: (blocks, 1), threads: TILE, shared: 4 * experts };
        let args = [Arg::At(at), Arg::At(tile), Arg::Word(n), Arg::Word(experts), Arg::Word(1)];
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, source("tile_counts"), small(tiles), &args) }?;
        let args = [
            Arg::At(tile),
            Arg::At(counts),
            Arg::At(over),
            Arg::Word(tiles),
            Arg::Word(experts),
            Arg::Word(1),
            Arg::Word(n),
        ];
        // SAFETY: as above.
        unsafe { self.launch(stream, source("tile_starts"), small(1), &args) }?;
        let args = [
            Arg::At(counts),
            Arg::At(dbias),
            Arg::Word(n),
            Arg::Word(experts),
            Arg::Real(factor),
            Arg::Word(fresh(mode)),
        ];
        let grid = Grid::of(experts.div_ceil(256), 256);
        // SAFETY: as above.
        unsafe { self.launch(stream, source("router_bias"), grid, &args) }
    }

    /// Copies tokens to their experts' rows. A choice for which there is no row is at no slot; the
    /// counts tell.
    pub fn dispatch(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: DispatchShape,
        on: &DispatchAt,
    ) -> Result<(), CudaError> {
        let DispatchShape { tokens, topk, experts, regions, slots } = shape;
        let n = word(tokens.rows * topk);
        let choices = self.of("the choices", on.choices, u64::from(n), ElementType::F32)?;
        let slots_at = self.of("the slots", on.slots, u64::from(n), ElementType::F32)?;
        let counts = self.of("the counts", on.counts, experts as u64, ElementType::F32)?;
        let x = self.of("the tokens", on.x, elements(tokens), element)?;
        let of_rows = (slots * tokens.width) as u64;
        let rows = self.of("the experts' rows", on.rows, of_rows, element)?;
        let tiles = n.div_ceil(TILE);
        let sizes = [u64::from(tiles) * experts as u64 * 4, 4, slots as u64 * 4];
        let [tile, over, origins] = self.scratch(stream, sizes)?;
        self.fill_bytes(stream, origins, 0xff, slots as u64 * 4)?;
        let (every, region_rows) = (word(experts), word(slots / regions.max(1)));
        let source = |name| (Source::Experts, element, name);
        let small = |blocks| Grid { blocks: (blocks, 1), threads: TILE, shared: 4 * every };
        let args = [Arg::At(choices), Arg::At(tile), Arg::Word(n), Arg::Word(every), Arg::Word(0)];
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, source("tile_counts"), small(tiles), &args) }?;
        let args = [
            Arg::At(tile),
            Arg::At(counts),
            Arg::At(over),
            Arg::Word(tiles),
            Arg::Word(every),
            Arg::Word(word(regions)),
            Arg::Word(region_rows),
        ];
        // SAFETY: as above.
        unsafe { self.launch(stream, source("tile_starts"), small(1), &args) }?;
        let args = [
            Arg::At(choices),
            Arg::At(tile),
            Arg::At(slots_at),
            Arg::At(origins),
            Arg::Word(n),
            Arg::Word(every),
            Arg::Word(word(regions)),
            Arg::Word(region_rows),
        ];
        let grid = Grid { blocks: (tiles, 1), threads: TILE, shared: 32 * 4 * every };
        // SAFETY: as above.
        unsafe { self.launch(stream, source("assign_slots"), grid, &args) }?;
        self.spread(stream, element, (tokens, topk, slots), (x, origins, 0, rows))
    }

    /// Copies tokens to the rows of their origins, times their gates if given.
    fn spread(
        &self,
        stream: Stream,
        element: ElementType,
        (tokens, topk, slots): (Rows, usize, usize),
        (x, origins, gates, rows): (u64, u64, u64, u64),
    ) -> Result<(), CudaError> {
        let args = [
            Arg::At(x),
            Arg::At(origins),
            Arg::At(gates),
            Arg::At(rows),
            Arg::Word(word(slots)),
            Arg::Word(word(tokens.width)),
            Arg::Word(word(topk)),
        ];
        let grid = Grid::over((slots * tokens.width) as u64);
        // SAFETY: the callers have found the addresses to have the shape's lengths.
        unsafe { self.launch(stream, (Source::Experts, element, "dispatch_rows"), grid, &args) }
    }

    /// Sums of the rows of each token's choices, weighted by `gates` if given.
    pub fn combine(
        &self,
        stream: Stream,
        element: ElementType,
        (tokens, topk): (Rows, usize),
        (rows, slots, gates, y): (Span, Span, Option<Span>, Span),
    ) -> Result<(), CudaError> {
        let all = (tokens.rows * topk) as u64;
        let gates =
            gates.map_or(Ok(0), |gates| self.of("the gates", gates, all, ElementType::F32))?;
        let args = [
            Arg::At(self.at("the experts' rows", rows, rows.len)?),
            Arg::At(self.of("the slots", slots, all, ElementType::F32)?),
            Arg::At(gates),
            Arg::At(self.of("the tokens", y, elements(tokens), element)?),
            Arg::Word(word(tokens.rows)),
            Arg::Word(word(tokens.width)),
            Arg::Word(word(topk)),
        ];
        let grid = Grid::over(elements(tokens));
        // SAFETY: the addresses are those of spans of the shape's lengths; slots were assigned below
        // the number of the rows.
        unsafe { self.launch(stream, (Source::Experts, element, "combine_rows"), grid, &args) }
    }

    /// Gradients of a combination: of the experts' rows and of the gates.
    pub fn combine_gradient(
        &mut self,
        stream: Stream,
        element: ElementType,
        (tokens, topk, slots): (Rows, usize, usize),
        (dy, rows, slots_at, gates): (Span, Span, Span, Span),
        (drows, dgates): (Span, Span),
    ) -> Result<(), CudaError> {
        let (n, of_rows) = (word(tokens.rows * topk), (slots * tokens.width) as u64);
        let dy = self.of("dy", dy, elements(tokens), element)?;
        let rows = self.of("the experts' rows", rows, of_rows, element)?;
        let slots_at = self.of("the slots", slots_at, u64::from(n), ElementType::F32)?;
        let gates = self.of("the gates", gates, u64::from(n), ElementType::F32)?;
        let drows = self.of("the rows' gradient", drows, of_rows, element)?;
        let dgates = self.of("the gates' gradient", dgates, u64::from(n), ElementType::F32)?;
        let [origins] = self.scratch(stream, [slots as u64 * 4])?;
        self.fill_bytes(stream, origins, 0xff, slots as u64 * 4)?;
        let source = |name| (Source::Experts, element, name);
        let args = [Arg::At(slots_at), Arg::At(origins), Arg::Word(n)];
        let grid = Grid::of(n.div_ceil(256), 256);
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, source("invert_slots"), grid, &args) }?;
        self.spread(stream, element, (tokens, topk, slots), (dy, origins, gates, drows))?;
        let args = [
            Arg::At(dy),
            Arg::At(rows),
            Arg::At(slots_at),
            Arg::At(dgates),
            Arg::Word(n),
            Arg::Word(word(tokens.width)),
            Arg::Word(word(topk)),
        ];
        // SAFETY: as above.
        unsafe { self.launch(stream, source("gate_gradient"), Grid::of(n.div_ceil(8), 256), &args) }
    }

    /// A pass of the experts' products, each on its own rows, of which the host knows the `counts`
    /// by region and expert. `left` and `right` are x and w, dy and w, or x and dy.
    pub fn expert_linear(
        &mut self,
        stream: Stream,
        element: ElementType,
        (pass, shape, mode): (Pass, product::Shape, Write),
        counts: &[u32],
        (left, right, result): (Span, Span, Span),
    ) -> Result<(), CudaError> {
        let product::Shape { experts, regions, region_rows, inputs, outputs } = shape;
        let rows = (regions * region_rows) as u64;
        let (inputs, outputs) = (inputs as u64, outputs as u64);
        let (of_x, of_y) = (rows * inputs, rows * outputs);
        let of_w = experts as u64 * outputs * inputs;
        let (lengths, written) = match pass {
            Pass::Forward => ([of_x, of_w, of_y], element),
            Pass::InputGradient => ([of_y, of_w, of_x], element),
            Pass::WeightGradient => ([of_x, of_y, of_w], ElementType::F32),
        };
        let left = self.of("the experts' rows", left, lengths[0], element)?;
        let right = self.of("the experts' operand", right, lengths[1], element)?;
        if pass != Pass::WeightGradient || mode == Write::Overwrite {
            // Rows without a token, and experts without one, are zero.
            self.clear(stream, result)?;
        }
        let result = self.of("the experts' result", result, lengths[2], written)?;
        let size = element.bytes();
        for (region, counts) in counts.chunks(experts.max(1)).take(regions).enumerate() {
            let mut next = region * region_rows;
            let end = next + region_rows;
            for (expert, &count) in counts.iter().enumerate() {
                let (first, last) = (next, (next + count as usize).min(end));
                next = last;
                if first == last {
                    continue;
                }
                let (at, of) = (first as u64, expert as u64 * outputs * inputs);
                let (x, y) = (at * inputs * size, at * outputs * size);
                let (left, right, result) = match pass {
                    Pass::Forward => (left + x, right + of * size, result + y),
                    Pass::InputGradient => (left + y, right + of * size, result + x),
                    Pass::WeightGradient => (left + x, right + y, result + of * 4),
                };
                let product = Product {
                    pass,
                    rows: (last - first) as u64,
                    inputs,
                    outputs,
                    operand: element,
                    result: written,
                    accumulate: pass == Pass::WeightGradient,
                    epilogue: super::super::product::Epilogue::None,
                };
                let operands =
                    Operands { left, right, addend: result, result, ..Operands::default() };
                // SAFETY: the rows and the expert's weights are inside the spans.
                unsafe { self.product_once(stream, product, &operands) }?;
            }
        }
        Ok(())
    }
}
