//! Parser for the text form of plans.

use super::ParseError;
use super::line::Line;
use super::parse_items::{
    buffer, call, dims, entry, is_part, iteration_filter, lane, op, segment, service, view,
};
use super::print::{HEADER, Names};
use super::words::{Word, parse_group};
use crate::compress::Compression;
use crate::graph::OpKind;
use crate::ids::{BufferId, GroupId, OpId};
use crate::mesh::{AxisOrder, Mesh};
use crate::program::{
    Access, Bucket, CarryoverOp, ComputePass, IterationFilter, LocalOp, Memory, MemoryKind,
    Operand, Outputs, Plan, Program, Section, Template, TensorNorms,
};
use crate::samples::SampleKind;
use crate::strategy::{Offload, Split, Store, Strategy, TableSharding};
use crate::units::Bytes;
use std::fmt::Display;
use std::str::FromStr;

type Result<T> = std::result::Result<T, ParseError>;

/// Parses the output of [`print`](fn@super::print), or hand-written text.
///
/// Only the syntax is checked; [`validate`](crate::validate::validate) checks the meaning.
pub fn parse(text: &str) -> Result<Plan> {
    let mut reader = Reader::new(text);
    let plan = reader.plan()?;
    match reader.next() {
        Some(line) => line.error("a plan ends after its last program"),
        None => Ok(plan),
    }
}

/// Reader of the lines of a text, without comments and blank lines.
struct Reader<'t> {
    lines: std::iter::Enumerate<std::str::Lines<'t>>,
    peeked: Option<Line<'t>>,
    last: usize,
}

impl<'t> Reader<'t> {
    fn new(text: &'t str) -> Self {
        let mut reader = Self { lines: text.lines().enumerate(), peeked: None, last: 1 };
        reader.peeked = reader.fetch();
        reader
    }

    fn fetch(&mut self) -> Option<Line<'t>> {
        for (index, text) in self.lines.by_ref() {
            self.last = index + 1;
            let line = Line::new(index + 1, text);
            if !line.is_empty() && !line.peek().starts_with('#') {
                return Some(line);
            }
        }
        None
    }

    fn next(&mut self) -> Option<Line<'t>> {
        let line = self.peeked.take();
        if line.is_some() {
            self.peeked = self.fetch();
        }
        line
    }

    /// Returns the next line; `what` describes it in errors.
    fn line(&mut self, what: &str) -> Result<Line<'t>> {
        let message = || format!("expected {what}, found the end of the text");
        let last = self.last;
        self.next().ok_or_else(|| ParseError { line: last, message: message() })
    }

    /// Returns the next line without its first word, which must be `word`.
    fn line_of(&mut self, word: &str) -> Result<Line<'t>> {
        let mut line = self.line(&format!("'{word}'"))?;
        line.expect(word)?;
        Ok(line)
    }

    /// Reads a line of a name and a value.
    fn field<T: FromStr<Err: Display>>(&mut self, name: &str) -> Result<T> {
        let mut line = self.line_of(name)?;
        let value = line.value(name)?;
        line.end()?;
        Ok(value)
    }

    /// Reads a line that consists of this heading.
    fn heading(&mut self, heading: &str) -> Result<()> {
        self.line_of(heading)?.end()
    }

    /// Returns the next line if it starts with `prefix`; its number must be `count`.
    fn numbered(&mut self, prefix: &str, count: usize, what: &str) -> Result<Option<Line<'t>>> {
        match self.peeked {
            Some(mut line) if line.starts_id(prefix) => {
                let id: usize = line.id(prefix, what)?;
                self.next();
                if id != count {
                    return line.error(format!("expected {what} {count}, found {id}"));
                }
                Ok(Some(line))
            }
            _ => Ok(None),
        }
    }

    fn samples(&mut self) -> Result<SampleKind> {
        /// Consumes a word and the number behind it.
        fn number<T: FromStr<Err: Display>>(line: &mut Line<'_>, word: &str) -> Result<T> {
            line.expect(word)?;
            line.value(word)
        }
        let mut line = self.line_of("samples")?;
        let line = &mut line;
        let samples = match line.word("kind of samples")? {
            "tokens" => SampleKind::Tokens {
                vocab: number(line, "vocab")?,
                seq: number(line, "seq")?,
                lookahead: number(line, "lookahead")?,
            },
            "images" => SampleKind::Images {
                side: number(line, "side")?,
                channels: number(line, "channels")?,
                classes: number(line, "classes")?,
            },
            "digits" => SampleKind::Digits,
            "clicks" => {
                let (dense, lookups) = (number(line, "dense")?, number(line, "lookups")?);
                line.expect("tables")?;
                let mut tables = Vec::new();
                while !line.is_empty() {
                    tables.push(line.value("rows of a table")?);
                }
                SampleKind::Clicks { dense, lookups, tables }
            }
            other => return line.error(format!("there are no samples '{other}'")),
        };
        line.end()?;
        Ok(samples)
    }

    fn plan(&mut self) -> Result<Plan> {
        let header = HEADER.split(' ').collect::<Vec<_>>();
        let mut line = self.line(&format!("'{HEADER}'"))?;
        for word in header {
            line.expect(word)?;
        }
        line.end()?;
        let mut line = self.line_of("model")?;
        let model = line.string("the model's name")?;
        line.end()?;
        let (parameters, samples) = (self.field("parameters")?, self.samples()?);
        let norm_entries = self.field("norm_entries")?;
        let by_library = self.peeked.is_some_and(|line| line.peek() == "messages");
        let messages = by_library.then(|| self.field("messages")).transpose()?;
        let strategy = self.strategy()?;
        let mesh = self.mesh(strategy.axis_order)?;
        let mut plan = Plan {
            model,
            strategy,
            mesh,
            groups: Vec::new(),
            templates: Vec::new(),
            programs: Vec::new(),
            layers: Vec::new(),
            parameters,
            samples,
            norm_entries,
            messages,
        };
        self.heading("[groups]")?;
        while let Some(mut line) = self.numbered("g", plan.groups.len(), "group")? {
            plan.groups.push(parse_group(&mut line)?);
            line.end()?;
        }
        self.heading("[layers]")?;
        while let Some(mut line) = self.peeked.filter(|line| line.peek() == "\"") {
            self.next();
            plan.layers.push(line.string("a layer's name")?);
            line.end()?;
        }
        self.heading("[templates]")?;
        while let Some(line) = self.numbered("t", plan.templates.len(), "template")? {
            let template = self.template(line)?;
            plan.templates.push(template);
        }
        while self.peeked.is_some() {
            let program = self.program(&plan)?;
            plan.programs.push(program);
        }
        Ok(plan)
    }

    fn strategy(&mut self) -> Result<Strategy> {
        self.heading("[strategy]")?;
        let mut strategy = Strategy {
            dp: self.field("dp")?,
            tp: self.field("tp")?,
            pp: self.field("pp")?,
            cp: self.field("cp")?,
            ep: self.field("ep")?,
            etp: self.field("etp")?,
            axis_order: AxisOrder::default(),
            sp: self.field("sp")?,
            zero: self.field("zero")?,
            schedule: self.field("schedule")?,
            global_batch: self.field("global_batch")?,
            micro_batch: self.field("micro_batch")?,
            seq: self.field("seq")?,
            recompute: self.field("recompute")?,
            dtype: self.field("dtype")?,
            grad_dtype: self.field("grad_dtype")?,
            order: self.field("order")?,
            leaves: self.field("leaves")?,
            sync: self.field("sync")?,
            collective: self.field("collective")?,
            bucket: Bytes(self.field("bucket")?),
            overlap: self.field("overlap")?,
            optimizer: self.field("optimizer")?,
            split: Split::default(),
            sync_batch_norm: false,
            expert_buffer_factor: 1.0,
            offload: Offload::default(),
            store: Store::default(),
            table_sharding: TableSharding::default(),
            compress: Compression::None,
            compress_warmup: None,
            local: None,
        };
        if self.peeked.is_some_and(|line| line.peek() == "split") {
            strategy.split = self.field("split")?;
        }
        if self.peeked.is_some_and(|line| line.peek() == "table_sharding") {
            strategy.table_sharding = self.field("table_sharding")?;
        }
        if self.peeked.is_some_and(|line| line.peek() == "sync_batch_norm") {
            strategy.sync_batch_norm = self.field("sync_batch_norm")?;
        }
        if self.peeked.is_some_and(|line| line.peek() == "expert_buffer_factor") {
            strategy.expert_buffer_factor = self.field("expert_buffer_factor")?;
        }
        if self.peeked.is_some_and(|line| line.peek() == "offload") {
            strategy.offload = self.field("offload")?;
            strategy.store = self.field("store")?;
        }
        if self.peeked.is_some_and(|line| line.peek() == "compress") {
            strategy.compress = self.field("compress")?;
        }
        if self.peeked.is_some_and(|line| line.peek() == "compress_warmup") {
            strategy.compress_warmup = Some(self.field("compress_warmup")?);
        }
        if self.peeked.is_some_and(|line| line.peek() == "local") {
            strategy.local = Some(self.field("local")?);
        }
        if self.peeked.is_some_and(|line| line.peek() == "axis_order") {
            strategy.axis_order = self.field("axis_order")?;
        }
        Ok(strategy)
    }

    fn mesh(&mut self, order: AxisOrder) -> Result<Mesh> {
        self.heading("[mesh]")?;
        let mut line = self.line("the mesh")?;
        let mut axis = |name: &str| {
            line.expect(name)?;
            line.value(name)
        };
        let mesh = Mesh {
            pp: axis("pp")?,
            dp: axis("dp")?,
            cp: axis("cp")?,
            tp: axis("tp")?,
            ep: axis("ep")?,
            etp: axis("etp")?,
            servers: axis("servers")?,
            order,
        };
        line.end()?;
        Ok(mesh)
    }

    fn template(&mut self, mut line: Line<'t>) -> Result<Template> {
        let name = line.string("the template's name")?;
        let pass = ComputePass::parse(&mut line)?;
        line.end()?;
        let mut template = Template { name, pass, operands: Vec::new(), ops: Vec::new() };
        while let Some(mut line) = self.numbered("o", template.operands.len(), "operand")? {
            let access = Access::parse(&mut line)?;
            let dims = dims(&mut line)?;
            let dtype = line.value("element type")?;
            line.end()?;
            template.operands.push(Operand { dims, dtype, access });
        }
        while let Some(mut line) = self.peeked.filter(|line| is_part(line.peek())) {
            self.next();
            let part = Word::parse(&mut line)?;
            let kind = OpKind::parse(&mut line)?;
            let mut operands = |word: &str| {
                if line.eat(word) { line.ids("o", "operand") } else { Ok(Vec::new()) }
            };
            let (inputs, params, outputs) =
                (operands("in")?, operands("params")?, operands("out")?);
            line.end()?;
            template.ops.push(LocalOp { kind, pass: part, inputs, params, outputs });
        }
        Ok(template)
    }

    fn program(&mut self, plan: &Plan) -> Result<Program> {
        let mut program = self.program_head(plan.programs.len())?;
        while let Some(line) = self.numbered("b", program.buffers.len(), "buffer")? {
            program.buffers.push(buffer(line)?);
        }
        while let Some(mut line) = self.numbered("frame", program.frames.len(), "frame")? {
            let buffers = if line.eat("of") { line.ids("b", "buffer")? } else { Vec::new() };
            line.end()?;
            program.frames.push(buffers.into_iter().map(BufferId).collect());
        }
        while let Some(line) = self.numbered("s", program.segments.len(), "segment")? {
            let segment = segment(&program, line)?;
            program.segments.push(segment);
        }
        while let Some(line) = self.numbered("c", program.calls.len(), "call")? {
            let call = call(&program, line)?;
            program.calls.push(call);
        }
        while let Some(line) = self.numbered("bucket", program.buckets.len(), "bucket")? {
            let bucket = self.bucket(&program, line)?;
            program.buckets.push(bucket);
        }
        while let Some(line) = self.numbered("service", program.services.len(), "service")? {
            let service = service(&program, line)?;
            program.services.push(service);
        }
        while let Some(mut line) = self.peeked.filter(|line| line.peek() == "in_flight") {
            self.next();
            line.expect("in_flight")?;
            let op = OpId(line.value("op")?);
            let mut before = Vec::new();
            if !line.is_empty() {
                line.expect("before")?;
            }
            while !line.is_empty() {
                before.push(OpId(line.value("op")?));
            }
            program.in_flight.push(CarryoverOp { op, before });
        }
        let names = Names::new(plan, &program);
        let prologue = self.section(&program, &names, "prologue")?;
        let body = self.section(&program, &names, "body")?;
        let epilogue = self.section(&program, &names, "epilogue")?;
        Ok(Program { prologue, body, epilogue, ..program })
    }

    /// Reads a program's first lines, up to its buffers.
    fn program_head(&mut self, role: usize) -> Result<Program> {
        let mut line = self.line_of("[program")?;
        let found: usize = line.value("role")?;
        if found != role {
            return line.error(format!("expected program {role}, found {found}"));
        }
        let name = line.string("the program's name")?;
        line.expect("]")?;
        line.end()?;
        let mut line = self.line_of("lanes")?;
        let mut lanes = Vec::new();
        while !line.is_empty() {
            lanes.push(line.string("a lane's name")?);
        }
        let mut line = self.line_of("memory")?;
        let mut memory = Memory::default();
        for kind in MemoryKind::ALL {
            // Empty kinds outside the arena are omitted.
            if MemoryKind::ARENA.contains(&kind) {
                line.expect(kind.word())?;
            } else if !line.eat(kind.word()) {
                continue;
            }
            memory.by_kind[kind as usize] = Bytes(line.value("number of bytes")?);
        }
        line.end()?;
        let mut line = self.line_of("outputs")?;
        let mut output = |word: &str| -> Result<Option<BufferId>> {
            Ok(if line.eat(word) { Some(BufferId(line.id("b", "buffer")?)) } else { None })
        };
        let outputs =
            Outputs { loss: output("loss")?, norm: output("norm")?, dropped: output("dropped")? };
        line.end()?;
        Ok(Program {
            name,
            lanes,
            buffers: Vec::new(),
            frames: Vec::new(),
            segments: Vec::new(),
            calls: Vec::new(),
            buckets: Vec::new(),
            services: Vec::new(),
            prologue: Section::default(),
            body: Section::default(),
            epilogue: Section::default(),
            in_flight: Vec::new(),
            outputs,
            memory,
        })
    }

    fn bucket(&mut self, program: &Program, mut line: Line<'t>) -> Result<Bucket> {
        let name = line.string("the bucket's name")?;
        line.expect("elements")?;
        let elements = line.value("number of elements")?;
        line.expect("params")?;
        let params = view(program, &mut line)?;
        line.expect("grads")?;
        let grads = view(program, &mut line)?;
        let master = if line.eat("master") { Some(view(program, &mut line)?) } else { None };
        let mut moments = Vec::new();
        if line.eat("moments") {
            while line.starts_id("b") {
                moments.push(view(program, &mut line)?);
            }
        }
        let mut offloaded = Vec::new();
        if line.eat("offloaded") {
            while line.starts_id("b") {
                offloaded.push(view(program, &mut line)?);
            }
        }
        let tensor_norms = if line.eat("tensor_norms") {
            let weights = view(program, &mut line)?;
            let directions = view(program, &mut line)?;
            Some(TensorNorms { weights, directions, tensors: view(program, &mut line)? })
        } else {
            None
        };
        let shard = if line.eat("shard") { Some(GroupId(line.id("g", "group")?)) } else { None };
        let updated = line.eat("updated");
        line.end()?;
        let mut entries = Vec::new();
        while let Some(line) = self.peeked.filter(|line| line.peek() == "\"") {
            self.next();
            entries.push(entry(line)?);
        }
        Ok(Bucket {
            name,
            elements,
            entries,
            params,
            grads,
            master,
            moments,
            offloaded,
            tensor_norms,
            shard,
            updated,
        })
    }

    fn section(&mut self, program: &Program, names: &Names<'_>, word: &str) -> Result<Section> {
        self.heading(word)?;
        let mut section = Section::default();
        while let Some(mut line) = self.numbered("", section.nodes.len(), "op")? {
            let lane = lane(program, names, &mut line)?;
            let op = op(program, names, &mut line)?;
            let turn =
                if line.eat("only") { iteration_filter(&mut line)? } else { IterationFilter::All };
            let mut after = Vec::new();
            if line.eat("after") {
                while !line.is_empty() {
                    after.push(OpId(line.value("op")?));
                }
            }
            line.end()?;
            if after.len() > usize::from(u16::MAX) {
                return line.error(format!("an op can wait for {} others at most", u16::MAX));
            }
            section.push_filtered(turn, lane, op, &after);
        }
        Ok(section)
    }
}
