//! Printer for the text form of plans.

use super::line::quote;
use super::words::{Word, print_group, print_init, print_load, print_peer, push};
use crate::compress::Compression;
use crate::ids::{LaneId, OpId, SegmentId};
use crate::mesh::AxisOrder;
use crate::program::{
    Bucket, Call, Entry, IterationFilter, MemoryKind, Op, Plan, Program, Section, Segment, Service,
    Template, TensorNorms, View,
};
use crate::samples::SampleKind;
use crate::strategy::{Offload, Split, Store, Strategy, TableSharding};
use std::fmt;

/// The first line of every plan.
pub(super) const HEADER: &str = "paceline plan 3";

/// Prints a whole plan in its text form; [`parse`](fn@super::parse) returns the same plan.
pub fn print(plan: &Plan) -> String {
    let mut printer = Printer { plan, out: String::new() };
    printer.plan();
    printer.out
}

struct Printer<'p> {
    plan: &'p Plan,
    out: String,
}

/// Appends to the text, with the syntax of `format!`.
macro_rules! put {
    ($printer:expr, $($text:tt)*) => { push(&mut $printer.out, format_args!($($text)*)) };
}

impl<'p> Printer<'p> {
    fn samples(&mut self, samples: &SampleKind) {
        match samples {
            SampleKind::Tokens { vocab, seq, lookahead } => {
                put!(self, "tokens vocab {vocab} seq {seq} lookahead {lookahead}\n");
            }
            SampleKind::Images { side, channels, classes } => {
                put!(self, "images side {side} channels {channels} classes {classes}\n");
            }
            SampleKind::Digits => put!(self, "digits\n"),
            SampleKind::Clicks { dense, lookups, tables } => {
                put!(self, "clicks dense {dense} lookups {lookups} tables");
                tables.iter().for_each(|rows| put!(self, " {rows}"));
                put!(self, "\n");
            }
        }
    }

    fn plan(&mut self) {
        let plan = self.plan;
        put!(self, "{HEADER}\nmodel ");
        quote(&plan.model, &mut self.out);
        put!(self, "\nparameters {}\nsamples ", plan.parameters);
        self.samples(&plan.samples);
        put!(self, "norm_entries {}\n", plan.norm_entries);
        if let Some(library) = plan.messages {
            put!(self, "messages {}\n", library.name());
        }
        self.strategy(&plan.strategy);
        let m = plan.mesh;
        put!(self, "\n[mesh]\npp {} dp {} cp {} tp {} ", m.pp, m.dp, m.cp, m.tp);
        put!(self, "ep {} etp {} servers {}\n", m.ep, m.etp, m.servers);
        put!(self, "\n[groups]\n");
        for (id, &group) in plan.groups.iter().enumerate() {
            put!(self, "g{id} ");
            print_group(group, &mut self.out);
            self.out.push('\n');
        }
        put!(self, "\n[layers]\n");
        for layer in &plan.layers {
            self.line_of("", layer);
            self.out.push('\n');
        }
        put!(self, "\n[templates]\n");
        for (id, template) in plan.templates.iter().enumerate() {
            self.template(id, template);
        }
        for (role, program) in plan.programs.iter().enumerate() {
            self.program(role, program);
        }
    }

    /// Writes `start` and a quoted name.
    fn line_of(&mut self, start: &str, name: &str) {
        self.out.push_str(start);
        quote(name, &mut self.out);
    }

    fn strategy(&mut self, s: &Strategy) {
        put!(self, "\n[strategy]\n");
        put!(
            self,
            "dp {}\ntp {}\npp {}\ncp {}\nep {}\netp {}\n",
            s.dp,
            s.tp,
            s.pp,
            s.cp,
            s.ep,
            s.etp
        );
        put!(self, "sp {}\nzero {}\nschedule {}\n", s.sp, s.zero, s.schedule);
        put!(
            self,
            "global_batch {}\nmicro_batch {}\nseq {}\n",
            s.global_batch,
            s.micro_batch,
            s.seq
        );
        put!(self, "recompute {}\ndtype {}\ngrad_dtype {}\n", s.recompute, s.dtype, s.grad_dtype);
        put!(self, "order {}\nleaves {}\nsync {}\n", s.order, s.leaves, s.sync);
        put!(self, "collective {}\nbucket {}\n", s.collective, s.bucket.0);
        put!(self, "overlap {}\noptimizer {}\n", s.overlap, s.optimizer);
        // Added later, so defaults are omitted: split by cost, no offloading.
        if s.split != Split::default() {
            put!(self, "split {}\n", s.split);
        }
        if s.table_sharding != TableSharding::default() {
            put!(self, "table_sharding {}\n", s.table_sharding);
        }
        if s.sync_batch_norm {
            put!(self, "sync_batch_norm {}\n", s.sync_batch_norm);
        }
        // Likewise: only experts on several ranks need expert buffers.
        if s.expert_buffer_factor != 1.0 {
            put!(self, "expert_buffer_factor {:?}\n", s.expert_buffer_factor);
        }
        if (s.offload, s.store) != (Offload::default(), Store::default()) {
            put!(self, "offload {}\nstore {}\n", s.offload, s.store);
        }
        if s.compress != Compression::None {
            put!(self, "compress {}\n", s.compress);
        }
        if let Some(warm_up) = s.compress_warmup {
            put!(self, "compress_warmup {warm_up}\n");
        }
        if let Some(local) = s.local {
            put!(self, "local {local}\n");
        }
        if s.axis_order != AxisOrder::default() {
            put!(self, "axis_order {}\n", s.axis_order);
        }
    }

    fn template(&mut self, id: usize, template: &Template) {
        self.line_of(&format!("t{id} "), &template.name);
        put!(self, " {}\n", template.pass.word());
        for (at, operand) in template.operands.iter().enumerate() {
            let [rows, width] = operand.dims;
            put!(self, "  o{at} {} {rows}x{width} {}\n", operand.access.word(), operand.dtype);
        }
        for op in &template.ops {
            put!(self, "  {} ", op.pass.word());
            op.kind.print(&mut self.out);
            for (word, operands) in
                [("in", &op.inputs), ("params", &op.params), ("out", &op.outputs)]
            {
                self.ids(word, "o", operands.iter());
            }
            self.out.push('\n');
        }
    }

    /// Writes ` word x1 x2`, or nothing for an empty list.
    fn ids<T: fmt::Display>(&mut self, word: &str, prefix: &str, ids: impl Iterator<Item = T>) {
        for (at, id) in ids.enumerate() {
            if at == 0 {
                put!(self, " {word}");
            }
            put!(self, " {prefix}{id}");
        }
    }

    fn program(&mut self, role: usize, program: &Program) {
        self.line_of(&format!("\n[program {role} "), &program.name);
        put!(self, "]\nlanes");
        for lane in &program.lanes {
            self.line_of(" ", lane);
        }
        put!(self, "\nmemory");
        for kind in MemoryKind::ALL {
            let bytes = program.memory.of(kind).0;
            if MemoryKind::ARENA.contains(&kind) || bytes > 0 {
                put!(self, " {} {bytes}", kind.word());
            }
        }
        put!(self, "\noutputs");
        self.ids("loss", "b", program.outputs.loss.iter());
        self.ids("norm", "b", program.outputs.norm.iter());
        self.ids("dropped", "b", program.outputs.dropped.iter());
        self.out.push('\n');
        for (id, b) in program.buffers.iter().enumerate() {
            self.line_of(&format!("b{id} "), &b.name);
            put!(self, " {}[{}]", b.dtype, b.elements);
            if b.copies != 1 {
                put!(self, "x{}", b.copies);
            }
            put!(self, " {} @{}\n", b.kind.word(), b.offset.0);
        }
        for (id, frame) in program.frames.iter().enumerate() {
            put!(self, "frame{id}");
            self.ids("of", "b", frame.iter());
            self.out.push('\n');
        }
        for (id, segment) in program.segments.iter().enumerate() {
            self.segment(program, id, segment);
        }
        for (id, call) in program.calls.iter().enumerate() {
            self.call(program, id, call);
        }
        for (id, bucket) in program.buckets.iter().enumerate() {
            self.bucket(program, id, bucket);
        }
        for (id, service) in program.services.iter().enumerate() {
            self.service(program, id, service);
        }
        for flight in &program.in_flight {
            put!(self, "in_flight {}", flight.op);
            if !flight.before.is_empty() {
                put!(self, " before");
            }
            for op in &flight.before {
                put!(self, " {op}");
            }
            self.out.push('\n');
        }
        let names = Names::new(self.plan, program);
        for (word, section) in [
            ("prologue", &program.prologue),
            ("body", &program.body),
            ("epilogue", &program.epilogue),
        ] {
            self.section(program, &names, word, section);
        }
    }

    /// Writes ` b7` for a whole buffer, ` b7[0..8192]` for a part.
    fn view(&mut self, program: &Program, view: View) {
        let View { buffer, offset, len } = view;
        let whole = program.buffers.get(buffer.index()).map(|buffer| buffer.elements);
        put!(self, " b{buffer}");
        match offset.checked_add(len) {
            Some(_) if offset == 0 && whole == Some(len) => {}
            Some(end) => put!(self, "[{offset}..{end}]"),
            None => put!(self, "[{offset}+{len}]"),
        }
    }

    fn segment(&mut self, program: &Program, id: usize, segment: &Segment) {
        put!(self, "s{id} t{}", segment.template);
        if let Some(layer) = segment.layer {
            put!(self, " layer {layer}");
        }
        self.out.push_str(" on");
        for &view in &segment.operands {
            self.view(program, view);
        }
        self.out.push('\n');
    }

    fn call(&mut self, program: &Program, id: usize, call: &Call) {
        self.line_of(&format!("c{id} "), &call.name);
        put!(self, " {} {} {}", call.kind, call.reduction, call.method);
        put!(self, " {} {} g{}", call.order, call.dtype, call.group);
        if call.root != 0 {
            put!(self, " root {}", call.root);
        }
        if call.block != 1 {
            put!(self, " block {}", call.block);
        }
        self.view(program, call.input);
        if call.output != call.input {
            self.out.push_str(" into");
            self.view(program, call.output);
        }
        self.out.push('\n');
    }

    fn bucket(&mut self, program: &Program, id: usize, bucket: &Bucket) {
        self.line_of(&format!("bucket{id} "), &bucket.name);
        put!(self, " elements {} params", bucket.elements);
        self.view(program, bucket.params);
        self.out.push_str(" grads");
        self.view(program, bucket.grads);
        if let Some(master) = bucket.master {
            self.out.push_str(" master");
            self.view(program, master);
        }
        if !bucket.moments.is_empty() {
            self.out.push_str(" moments");
            for &moment in &bucket.moments {
                self.view(program, moment);
            }
        }
        if !bucket.offloaded.is_empty() {
            self.out.push_str(" offloaded");
            for &view in &bucket.offloaded {
                self.view(program, view);
            }
        }
        if let Some(TensorNorms { weights, directions, tensors }) = bucket.tensor_norms {
            self.out.push_str(" tensor_norms");
            for view in [weights, directions, tensors] {
                self.view(program, view);
            }
        }
        if let Some(group) = bucket.shard {
            put!(self, " shard g{group}");
        }
        self.out.push_str(if bucket.updated { " updated\n" } else { "\n" });
        for entry in &bucket.entries {
            self.entry(entry);
        }
    }

    fn entry(&mut self, entry: &Entry) {
        self.line_of("  ", &entry.name);
        let ([rows, width], [local_rows, local_width]) = (entry.dims, entry.local);
        put!(self, " {rows}x{width}");
        self.ids("blocks", "", entry.blocks.iter());
        if entry.experts > 0 {
            put!(self, " experts {}", entry.experts);
        }
        put!(self, " {} local {local_rows}x{local_width} at {} ", entry.tp, entry.offset);
        print_init(entry.init, &mut self.out);
        let flags = [
            (entry.decay, " decay"),
            (entry.running, " running"),
            (entry.sparse, " sparse"),
            (entry.counted, " counted"),
        ];
        for (flag, word) in flags {
            self.out.push_str(if flag { word } else { "" });
        }
        put!(self, " norm {}\n", entry.norm_entry);
    }

    fn service(&mut self, program: &Program, id: usize, service: &Service) {
        put!(self, "service{id} g{} receives", service.group);
        self.view(program, service.receives);
        self.out.push_str(" sends");
        self.view(program, service.sends);
        put!(self, " requests {}", service.requests);
        if let Some(staleness) = service.staleness {
            put!(self, " staleness {staleness}");
        }
        self.out.push('\n');
    }

    fn section(&mut self, program: &Program, names: &Names<'_>, word: &str, section: &Section) {
        put!(self, "{word}\n");
        for (id, node) in section.nodes.iter().enumerate() {
            put!(self, "{id} @");
            match names.lane(node.lane) {
                Some(name) => self.out.push_str(name),
                None => put!(self, "{}", node.lane),
            }
            self.op(program, names, &node.op);
            if node.filter != IterationFilter::All {
                put!(self, " only {}", node.filter.word());
            }
            self.ids("after", "", section.after(OpId(id as u32)).iter());
            self.out.push('\n');
        }
    }

    fn op(&mut self, program: &Program, names: &Names<'_>, op: &Op) {
        match *op {
            Op::Load { what, into, microbatch } => {
                self.out.push_str(" load ");
                print_load(what, &mut self.out);
                put!(self, " mb{microbatch} b{into}");
            }
            Op::Compute { segment, microbatch, fresh } => {
                let token = names.segment(segment);
                put!(self, " {token}{microbatch} s{segment}{}", if fresh { " fresh" } else { "" });
            }
            Op::Send { to, channel, view, microbatch } => {
                put!(self, " send mb{microbatch} ");
                print_peer(to, &mut self.out);
                put!(self, " ch{channel}");
                self.view(program, view);
            }
            Op::Recv { from, channel, view, microbatch } => {
                put!(self, " recv mb{microbatch} ");
                print_peer(from, &mut self.out);
                put!(self, " ch{channel}");
                self.view(program, view);
            }
            Op::Collective { call, microbatch } => put!(self, " collective mb{microbatch} c{call}"),
            Op::Accumulate { from, into, mode } => {
                put!(self, " {}", mode.word());
                self.pair(program, from, into);
            }
            Op::Step { bucket, phase } => put!(self, " {} bucket{bucket}", phase.word()),
            Op::Stash { from, into, microbatch } => {
                put!(self, " stash mb{microbatch}");
                self.pair(program, from, into);
            }
            Op::Restore { from, into, microbatch } => {
                put!(self, " restore mb{microbatch}");
                self.pair(program, from, into);
            }
            Op::Free { frame, microbatch } => put!(self, " free mb{microbatch} frame{frame}"),
            Op::Serve { service } => put!(self, " serve service{service}"),
        }
    }

    fn pair(&mut self, program: &Program, from: View, into: View) {
        self.view(program, from);
        self.out.push_str(" into");
        self.view(program, into);
    }
}

/// Names of lanes and segments in a program's ops.
pub(super) struct Names<'p> {
    /// By lane: its name, if it is a plain word that no earlier lane uses.
    pub(super) lanes: Vec<Option<&'p str>>,
    /// By segment: layer and pass, as written before the microbatch.
    segments: Vec<String>,
}

impl<'p> Names<'p> {
    /// Collects the names of a program.
    pub(super) fn new(plan: &Plan, program: &'p Program) -> Self {
        let mut lanes = Vec::new();
        for name in program.lanes.iter().map(String::as_str) {
            let plain = name.starts_with(|c: char| c.is_ascii_alphabetic())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
            let known = lanes.contains(&Some(name));
            lanes.push((plain && !known).then_some(name));
        }
        let token = |segment: &Segment| match (
            plan.templates.get(segment.template as usize),
            segment.layer,
        ) {
            (Some(template), Some(layer)) => format!("{layer}{}", template.pass.letter()),
            (Some(template), None) => template.pass.letter().to_string(),
            (None, _) => "?".into(),
        };
        Self { lanes, segments: program.segments.iter().map(token).collect() }
    }

    fn lane(&self, lane: LaneId) -> Option<&'p str> {
        self.lanes.get(lane.index()).copied().flatten()
    }

    /// Returns `3F`, `U`, or `?` if the segment or its template does not exist.
    pub(super) fn segment(&self, segment: SegmentId) -> &str {
        self.segments.get(segment.index()).map_or("?", String::as_str)
    }
}
