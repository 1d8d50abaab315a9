//! Feed-forward parts with experts.

use super::{Builder, activation};
use crate::graph::{Init, LinearRole, OpKind, Routing, Tensor, TensorClass};
use crate::ids::TensorId;
use crate::model::{Experts, Router};

impl Builder<'_> {
    /// Routed experts, plus a shared network for all tokens if the model has one.
    pub(super) fn experts(&mut self, x: TensorId) -> TensorId {
        let m = self.sizes.model;
        let d = &self.sizes.decoder;
        let Experts { experts, topk, shared_experts, router, .. } = m.experts;
        let logits = self.linear("router", x, &[experts], LinearRole::Router);
        let choices = self.tensor("choices", topk, TensorClass::Index);
        let gates = self.tensor("gates", topk, TensorClass::Statistic);
        let (mut made, mut params) = (vec![choices, gates], Vec::new());
        let routing = self.routing();
        if routing.capacity.is_some() {
            made.push(self.scalar("dropped", TensorClass::Dropped));
        }
        if router == Router::Sigmoid && d.choice_bias {
            params.push(self.param("router.bias", [1, experts], Init::Zero, false));
        }
        self.op(OpKind::Route(routing), &[logits], &params, &made);

        let rows = self.dispatched("dispatched", m.d_model);
        let slots = self.tensor("slots", topk, TensorClass::Index);
        let counts = self.push(Tensor {
            name: "counts".into(),
            dims: [1, experts],
            class: TensorClass::Counts,
            blocks: Vec::new(),
        });
        let kind = OpKind::Dispatch { experts, topk, regions: 1 };
        let sent = match d.gated_inputs {
            true => self.row_scaled("gated", x, gates, false),
            false => x,
        };
        self.op(kind, &[sent, choices], &[], &[rows, slots, counts]);
        let up_blocks = if m.gated() { vec![m.ffn, m.ffn] } else { vec![m.ffn] };
        let up = self.expert_linear("experts.up", rows, counts, &up_blocks, LinearRole::Up);
        let active = self.dispatched("experts.active", m.ffn);
        self.op(activation(m.activation), &[up], &[], &[active]);
        let down =
            self.expert_linear("experts.down", active, counts, &[m.d_model], LinearRole::Down);
        let combined = self.activation("combined", m.d_model);
        match d.gated_inputs {
            true => self.op(OpKind::Return { topk }, &[down, slots], &[], &[combined]),
            false => self.op(OpKind::Combine { topk }, &[down, slots, gates], &[], &[combined]),
        }
        if shared_experts == 0 {
            return combined;
        }
        let inner = if d.shared_ffn > 0 { d.shared_ffn } else { shared_experts * m.ffn };
        let mut shared = self.feed_forward("shared.", x, inner);
        if d.shared_gate {
            let gate = self.linear_with("shared.gate", x, &[1], LinearRole::Router, false);
            shared = self.row_scaled("shared.gated", shared, gate, true);
        }
        self.add("fed", combined, shared)
    }

    /// Rows of x, each times its number or the sigmoid of it.
    fn row_scaled(&mut self, name: &str, x: TensorId, by: TensorId, sigmoid: bool) -> TensorId {
        let y = self.activation(name, self.graph.tensor(x).dims[1]);
        self.op(OpKind::RowScale { sigmoid }, &[x, by], &[], &[y]);
        y
    }

    fn routing(&self) -> Routing {
        let (m, seq) = (self.sizes.model, self.sizes.seq);
        let sequences = (self.sizes.tokens_per_iteration / seq.max(1)).max(1);
        Routing {
            experts: m.experts.experts,
            topk: m.experts.topk,
            sigmoid: m.experts.router == Router::Sigmoid,
            scale: m.experts.route_scale,
            seq,
            capacity: m.experts.taken(seq),
            balance: m.experts.balance / sequences as f64,
            groups: m.experts.groups.max(1),
            kept_groups: m.experts.group_topk.max(1),
            parts: 1,
            raw: self.sizes.decoder.raw_gates,
            best_of_group: self.sizes.decoder.best_of_group,
        }
    }

    /// Tokens in expert order. Sharding determines the number of rows.
    fn dispatched(&mut self, name: &str, width: u64) -> TensorId {
        let dims = [self.sizes.tokens * self.sizes.model.experts.topk, width];
        let (name, class) = (name.into(), TensorClass::Dispatched);
        self.push(Tensor { name, dims, class, blocks: Vec::new() })
    }

    /// Multiplies every token by its expert's matrix.
    fn expert_linear(
        &mut self,
        name: &str,
        x: TensorId,
        counts: TensorId,
        blocks: &[u64],
        role: LinearRole,
    ) -> TensorId {
        let Experts { experts, .. } = self.sizes.model.experts;
        let [rows, inner] = self.graph.tensor(x).dims;
        let out: u64 = blocks.iter().sum();
        let init = self.spread(inner, role);
        let weight = self.param(&format!("{name}.weight"), [experts * out, inner], init, true);
        let param = &mut self.graph.params[weight.index()];
        param.experts = experts;
        if blocks.len() > 1 {
            param.blocks = blocks.to_vec();
        }
        let y = self.dispatched(name, out);
        let kind = OpKind::ExpertLinear { role, experts, regions: 1, rows };
        self.op(kind, &[x, counts], &[weight], &[y]);
        if !self.sizes.decoder.ffn_bias {
            return y;
        }
        let bias = self.param(&format!("{name}.bias"), [experts, out], Init::Zero, false);
        let param = &mut self.graph.params[bias.index()];
        param.experts = experts;
        if blocks.len() > 1 {
            param.blocks = blocks.to_vec();
        }
        let z = self.dispatched(&format!("{name}.biased"), out);
        self.op(OpKind::ExpertBias { experts, regions: 1, parts: 1 }, &[y, counts], &[bias], &[z]);
        z
    }
}
