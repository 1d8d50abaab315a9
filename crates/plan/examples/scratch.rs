#![allow(missing_docs)]
use paceline_plan::{lower, model::built_in, strategy::*, schedule::ScheduleKind, collective::Order, DType};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let model = built_in::get(&a[1]).unwrap().unwrap();
    let n = |i: usize| a[i].parse::<u32>().unwrap();
    let s = Strategy { tp: n(2), pp: n(3), dp: n(4), global_batch: n(5) as u64, seq: model.seq,
        schedule: a[6].parse::<ScheduleKind>().unwrap(), leaves: n(4), dtype: DType::Bf16, order: Order::Free, ..Default::default() };
    let t = std::time::Instant::now();
    match lower::lower(&model, &s) {
        Ok(p) => {
            println!("{:?}", t.elapsed());
            for q in &p.programs { println!("{} ops {} buffers {} segs {} mem {} {:?}", q.name, q.body.nodes.len(), q.buffers.len(), q.segments.len(), q.memory.total(), q.memory.by_kind.map(|b| b.to_string())); }
        }
        Err(e) => println!("{e}"),
    }
}
