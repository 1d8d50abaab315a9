//! Parser of single lines: a buffer, a segment, a call, an op.

use super::line::Line;
use super::print::Names;
use super::words::{Result, Word, parse_init, parse_load, parse_peer, parse_placement};
use crate::ids::{BufferId, CallId, GroupId, LaneId, LayerId, Microbatch, SegmentId};
use crate::program::{
    AccumulateMode, Buffer, Call, Entry, IterationFilter, MemoryKind, Op, Program, Segment,
    Service, StepPhase, View,
};
use crate::units::Bytes;
/// Reads an op's iteration filter, present if the op does not run in every iteration.
pub(super) fn iteration_filter(line: &mut Line<'_>) -> Result<IterationFilter> {
    let word = line.word("iteration filter")?;
    match [IterationFilter::Warmup, IterationFilter::AfterWarmup]
        .into_iter()
        .find(|filter| filter.word() == word)
    {
        Some(filter) => Ok(filter),
        None => line.error(format!("an op is filtered by warmup or after_warmup, not by '{word}'")),
    }
}

pub(super) fn is_part(word: &str) -> bool {
    crate::graph::OpPass::ALL.iter().any(|part| part.word() == word)
}

/// Reads dimensions: `384x128`.
pub(super) fn dims(line: &mut Line<'_>) -> Result<[u64; 2]> {
    let word = line.word("dimensions")?;
    match word.split_once('x') {
        Some((rows, width)) => Ok([line.read("rows", rows)?, line.read("width", width)?]),
        None => line.error(format!("dimensions are written like '4x8', not '{word}'")),
    }
}

pub(super) fn buffer(mut line: Line<'_>) -> Result<Buffer> {
    let name = line.string("the buffer's name")?;
    let shape = line.word("type and size")?;
    let parts =
        shape.split_once('[').and_then(|(dtype, rest)| Some((dtype, rest.split_once(']')?)));
    let Some((dtype, (elements, copies))) = parts else {
        return line.error(format!("type and size are written like 'f32[8]x2', not '{shape}'"));
    };
    let copies = match copies.strip_prefix('x') {
        Some(copies) => line.read("number of copies", copies)?,
        None if copies.is_empty() => 1,
        None => return line.error(format!("copies are written like 'x2', not '{copies}'")),
    };
    let dtype = line.read("element type", dtype)?;
    let elements = line.read("number of elements", elements)?;
    let kind = MemoryKind::parse(&mut line)?;
    let offset = Bytes(line.id("@", "address")?);
    line.end()?;
    Ok(Buffer { name, dtype, elements, copies, kind, offset })
}

/// Reads a view: `b7`, `b7[0..8192]`, `b7[0+8192]`.
pub(super) fn view(program: &Program, line: &mut Line<'_>) -> Result<View> {
    let word = line.word("view")?;
    let Some(inner) = word.strip_prefix('b') else {
        return line.error(format!("a view is written like 'b7' or 'b7[0..8]', not '{word}'"));
    };
    let Some((id, range)) = inner.split_once('[') else {
        let buffer = BufferId(line.read("buffer", inner)?);
        return match program.buffers.get(buffer.index()) {
            Some(whole) => Ok(View { buffer, offset: 0, len: whole.elements }),
            None => line.error(format!(
                "there is no buffer {buffer} to take the whole of, only {}",
                program.buffers.len()
            )),
        };
    };
    let buffer = BufferId(line.read("buffer", id)?);
    let range = range.strip_suffix(']').unwrap_or("");
    if let Some((offset, end)) = range.split_once("..") {
        let (offset, end): (u64, u64) = (line.read("offset", offset)?, line.read("end", end)?);
        return match end.checked_sub(offset) {
            Some(len) => Ok(View { buffer, offset, len }),
            None => line.error(format!("a view cannot end at {end}, before its start {offset}")),
        };
    }
    match range.split_once('+') {
        Some((offset, len)) => Ok(View {
            buffer,
            offset: line.read("offset", offset)?,
            len: line.read("length", len)?,
        }),
        None => line.error(format!("a view is written like 'b7' or 'b7[0..8]', not '{word}'")),
    }
}

pub(super) fn segment(program: &Program, mut line: Line<'_>) -> Result<Segment> {
    let template = line.id("t", "template")?;
    let layer = if line.eat("layer") { Some(LayerId(line.value("layer")?)) } else { None };
    line.expect("on")?;
    let mut operands = Vec::new();
    while !line.is_empty() {
        operands.push(view(program, &mut line)?);
    }
    Ok(Segment { template, layer, operands })
}

pub(super) fn call(program: &Program, mut line: Line<'_>) -> Result<Call> {
    let name = line.string("the call's name")?;
    let kind = line.value("collective")?;
    let reduction = line.value("reduction")?;
    let method = line.value("algorithm")?;
    let order = line.value("order")?;
    let dtype = line.value("element type")?;
    let group = GroupId(line.id("g", "group")?);
    let root = if line.eat("root") { line.value("root")? } else { 0 };
    let block = if line.eat("block") { line.value("block")? } else { 1 };
    let input = view(program, &mut line)?;
    let output = if line.eat("into") { view(program, &mut line)? } else { input };
    line.end()?;
    Ok(Call { name, kind, reduction, method, order, group, root, input, output, dtype, block })
}

pub(super) fn entry(mut line: Line<'_>) -> Result<Entry> {
    let name = line.string("the tensor's name")?;
    let shape = dims(&mut line)?;
    let mut blocks = Vec::new();
    if line.eat("blocks") {
        while line.starts_id("") {
            blocks.push(line.value("block")?);
        }
    }
    let experts = if line.eat("experts") { line.value("experts")? } else { 0 };
    let tp = parse_placement(&mut line)?;
    line.expect("local")?;
    let local = dims(&mut line)?;
    line.expect("at")?;
    let offset = line.value("offset")?;
    let init = parse_init(&mut line)?;
    let (decay, running) = (line.eat("decay"), line.eat("running"));
    let (sparse, counted) = (line.eat("sparse"), line.eat("counted"));
    line.expect("norm")?;
    let norm_entry = line.value("norm entry")?;
    line.end()?;
    Ok(Entry {
        name,
        dims: shape,
        blocks,
        experts,
        tp,
        local,
        offset,
        init,
        decay,
        running,
        sparse,
        counted,
        norm_entry,
    })
}

pub(super) fn service(program: &Program, mut line: Line<'_>) -> Result<Service> {
    let group = GroupId(line.id("g", "group")?);
    line.expect("receives")?;
    let receives = view(program, &mut line)?;
    line.expect("sends")?;
    let sends = view(program, &mut line)?;
    line.expect("requests")?;
    let requests = line.value("number of requests")?;
    let staleness = if line.eat("staleness") { Some(line.value("staleness")?) } else { None };
    line.end()?;
    Ok(Service { group, receives, sends, requests, staleness })
}

/// Reads a lane: `@compute`, or `@0` if the lane's name is not a plain word.
pub(super) fn lane(program: &Program, names: &Names<'_>, line: &mut Line<'_>) -> Result<LaneId> {
    let word = line.word("lane")?;
    let Some(name) = word.strip_prefix('@') else {
        return line.error(format!("a lane is written like '@compute', not '{word}'"));
    };
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        return Ok(LaneId(line.read("lane", name)?));
    }
    let at = names.lanes.iter().position(|&known| known == Some(name));
    match at.and_then(|at| u8::try_from(at).ok()) {
        Some(at) => Ok(LaneId(at)),
        None => {
            let lanes = program.lanes.join(", ");
            line.error(format!("there is no lane '{name}'; the lanes are {lanes}"))
        }
    }
}

pub(super) fn op(program: &Program, names: &Names<'_>, line: &mut Line<'_>) -> Result<Op> {
    if let Some((token, microbatch)) = compute_word(line.peek()) {
        line.word("op")?;
        let microbatch = Microbatch(line.read("microbatch", microbatch)?);
        let segment = SegmentId(line.id("s", "segment")?);
        let expected = names.segment(segment);
        if token != expected {
            return line.error(format!("segment {segment} is '{expected}', not '{token}'"));
        }
        return Ok(Op::Compute { segment, microbatch, fresh: line.eat("fresh") });
    }
    let word = line.word("op")?;
    let microbatch = |line: &mut Line<'_>| Ok(Microbatch(line.id("mb", "microbatch")?));
    Ok(match word {
        "load" => {
            let what = parse_load(line)?;
            let microbatch = microbatch(line)?;
            Op::Load { what, into: BufferId(line.id("b", "buffer")?), microbatch }
        }
        "send" | "recv" => {
            let microbatch = microbatch(line)?;
            let peer = parse_peer(line)?;
            let channel = line.id("ch", "channel")?;
            let view = view(program, line)?;
            if word == "send" {
                Op::Send { to: peer, channel, view, microbatch }
            } else {
                Op::Recv { from: peer, channel, view, microbatch }
            }
        }
        "collective" => {
            let microbatch = microbatch(line)?;
            Op::Collective { call: CallId(line.id("c", "call")?), microbatch }
        }
        "add" | "move" => {
            let mode = if word == "add" { AccumulateMode::Add } else { AccumulateMode::Move };
            let (from, into) = pair(program, line)?;
            Op::Accumulate { from, into, mode }
        }
        "step" => Op::Step { bucket: line.id("bucket", "bucket")?, phase: StepPhase::Apply },
        "tensor_norms" => {
            Op::Step { bucket: line.id("bucket", "bucket")?, phase: StepPhase::TensorNorms }
        }
        "local_momentum" => {
            Op::Step { bucket: line.id("bucket", "bucket")?, phase: StepPhase::LocalMomentum }
        }
        "apply_momentum" => {
            Op::Step { bucket: line.id("bucket", "bucket")?, phase: StepPhase::ApplyMomentum }
        }
        "stash" | "restore" => {
            let microbatch = microbatch(line)?;
            let (from, into) = pair(program, line)?;
            if word == "stash" {
                Op::Stash { from, into, microbatch }
            } else {
                Op::Restore { from, into, microbatch }
            }
        }
        "free" => {
            let microbatch = microbatch(line)?;
            Op::Free { frame: line.id("frame", "frame")?, microbatch }
        }
        "serve" => Op::Serve { service: line.id("service", "service")? },
        _ => return line.error(format!("there is no op '{word}'")),
    })
}

/// Splits `3F0` into `3F` and `0`; `None` if the word is not a computation.
fn compute_word(word: &str) -> Option<(&str, &str)> {
    let start = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let letter = start.chars().next().filter(|&c| c == '?' || "FBIWRU".contains(c))?;
    let microbatch = &start[letter.len_utf8()..];
    let digits = !microbatch.is_empty() && microbatch.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| (&word[..word.len() - microbatch.len()], microbatch))
}

fn pair(program: &Program, line: &mut Line<'_>) -> Result<(View, View)> {
    let from = view(program, line)?;
    line.expect("into")?;
    Ok((from, view(program, line)?))
}
