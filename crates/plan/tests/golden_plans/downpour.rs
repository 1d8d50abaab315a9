//! Downpour SGD (Dean et al., NIPS '12): three replicas and one server, which applies gradients on
//! arrival and replies with the newest weights. The server's op declares its peers, views and
//! number of requests.

use super::build::{Build, COMPUTE, compute, local, operand, template};
use paceline_plan::DType;
use paceline_plan::graph::{LinearRole, OpKind, OpPass};
use paceline_plan::ids::{GroupId, LaneId, Microbatch};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{
    Access, ComputePass, LoadKind, MemoryKind, Op, Peer, Plan, Program, Service,
};
use paceline_plan::samples::SampleKind;
use paceline_plan::strategy::{OptimizerKind, Strategy, Sync};

const TOKENS: u64 = 8;
const WIDTH: u64 = 32;

pub(crate) fn plan() -> Plan {
    let strategy = Strategy {
        dp: 3,
        leaves: 3,
        global_batch: 3,
        seq: TOKENS,
        sync: Sync::Servers(1),
        optimizer: OptimizerKind::Sgd,
        ..Strategy::default()
    };
    let linear = OpKind::Linear { role: LinearRole::Up };
    let gradient = template(
        "B.linear",
        ComputePass::Backward,
        vec![
            operand(TOKENS, WIDTH, Access::Read),
            operand(WIDTH, WIDTH, Access::Read),
            operand(TOKENS, WIDTH, Access::Write),
            operand(WIDTH, WIDTH, Access::Accumulate),
        ],
        vec![
            local(linear, OpPass::Forward, &[0], &[1], &[2]),
            local(linear, OpPass::BackwardWeight, &[2, 0], &[3], &[]),
        ],
    );
    Plan {
        model: "one linear layer".into(),
        mesh: strategy.mesh(),
        strategy,
        groups: vec![GroupKind::Served(0)],
        templates: vec![gradient],
        programs: vec![replica(), server()],
        layers: vec!["linear".into()],
        parameters: WIDTH * WIDTH,
        samples: SampleKind::Tokens { vocab: 64, seq: 16, lookahead: 0 },
        norm_entries: 1,
        messages: None,
    }
}

fn replica() -> Program {
    let mut b = Build::new("replica", &["compute", "load", "server-send", "server-recv"]);
    let w = b.buffer("weight", DType::F32, WIDTH * WIDTH, 1, MemoryKind::Parameters);
    let grad = b.buffer("weight.grad", DType::F32, WIDTH * WIDTH, 1, MemoryKind::Gradients);
    let x = b.activation("x", TOKENS * WIDTH, 1);
    let y = b.activation("y", TOKENS * WIDTH, 1);
    let segment = b.segment(0, &[x, w, y, grad]);
    let microbatch = Microbatch(0);
    let body = &mut b.program.body;
    let load = Op::Load { what: LoadKind::Tokens, into: x.buffer, microbatch };
    let loaded = body.push(LaneId(1), load, &[]);
    let done = body.push(COMPUTE, compute(segment, 0), &[loaded]);
    let (to, channel) = (Peer::Server(0), 0);
    let sent = body.push(LaneId(2), Op::Send { to, channel, view: grad, microbatch }, &[done]);
    body.push(LaneId(3), Op::Recv { from: to, channel, view: w, microbatch }, &[sent]);
    b.finish()
}

fn server() -> Program {
    let mut b = Build::new("server", &["compute", "serve"]);
    let w = b.buffer("weight", DType::F32, WIDTH * WIDTH, 1, MemoryKind::Parameters);
    let grad = b.buffer("weight.grad", DType::F32, WIDTH * WIDTH, 1, MemoryKind::Gradients);
    b.program.services.push(Service {
        group: GroupId(0),
        receives: grad,
        sends: w,
        requests: 1,
        staleness: None,
    });
    b.program.body.push(LaneId(1), Op::Serve { service: 0 }, &[]);
    b.finish()
}
