//! `paceline agent`: starts and watches the ranks of one host.

use super::with_json;
use crate::failure::Failure;
use crate::flags::{Problems, whole};
use crate::launch::{self, StaticAgent, environment};
use clap::Args;
use paceline_comm::launch::{
    USUAL_PORT, Variables, master_address, master_port, number, port_of, slurm_first_host,
    slurm_job,
};

/// Start and watch the ranks of this host, one agent per host
///
/// `paceline launch` starts agents by itself. Where an engine starts one process per host (a pod, or
/// `srun --ntasks-per-node=1`), that process is an agent: it starts the host's ranks, which find the
/// others at the first host. Hosts, their number and the address come from the engine's variables (PET_*,
/// SLURM_*, JOB_COMPLETION_INDEX and MASTER_ADDR) or from flags. A run that --out already has is
/// continued.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Take orders from a leader on standard input, as `paceline launch` wants it
    #[arg(long, hide = true)]
    stdio: bool,
    /// Number of hosts [default: PET_NNODES, or Slurm's number of tasks, or 1]
    #[arg(long, value_name = "N")]
    nodes: Option<String>,
    /// Number of this host, from 0 [default: PET_NODE_RANK, SLURM_PROCID or JOB_COMPLETION_INDEX]
    #[arg(long, value_name = "K")]
    node_index: Option<String>,
    /// Ranks on each host [default: PET_NPROC_PER_NODE, or the number of cores]
    #[arg(long, value_name = "N")]
    ranks_per_node: Option<String>,
    /// First host, where the ranks meet [default: MASTER_ADDR, PET_MASTER_ADDR or Slurm's first host]
    #[arg(long, value_name = "HOST")]
    address: Option<String>,
    /// Port on the first host [default: MASTER_PORT, PET_MASTER_PORT, or one that follows from the job]
    #[arg(long, value_name = "PORT")]
    port: Option<String>,
    /// After a rank has failed, start this host's ranks again, at most N times; the agents of other
    /// hosts do the same [default: 0]
    #[arg(long, value_name = "N")]
    max_restarts: Option<String>,
    /// Print only JSON on standard output, as the training run does
    #[arg(long)]
    json: bool,
    /// The training run: train --model NAME …
    #[arg(last = true, value_name = "train …")]
    arguments: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  srun --ntasks-per-node=1 paceline agent --ranks-per-node 8 -- train --model llama3-8b --tp 8 --dp 2
  paceline agent --nodes 2 --node-index 1 --ranks-per-node 4 --address head --port 29500 \\
         -- train --model mini --dp 8 --out /shared/run";

/// Serves a leader, or starts the ranks.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    if flags.stdio {
        return launch::serve(std::io::stdin(), std::io::stdout());
    }
    let mut problems = Problems::default();
    let agent = flags.check(&environment(), &mut problems);
    match agent {
        Some(agent) if problems.is_empty() => agent.run(),
        _ => Err(problems.into()),
    }
}

impl Flags {
    fn check(&self, variables: &Variables, problems: &mut Problems) -> Option<StaticAgent> {
        let found = |names: &[&str], problems: &mut Problems| {
            names.iter().find_map(|name| match number(variables, name) {
                Ok(number) => number,
                Err(error) => {
                    problems.add("the environment", error.to_string());
                    None
                }
            })
        };
        const MOST: u64 = 1 << 20;
        let flag = |name, text: &Option<String>, from, problems: &mut Problems| {
            whole(name, text.as_deref(), from..=MOST, problems).map(|number| number as u32)
        };
        let index = flag("--node-index", &self.node_index, 0, problems).or_else(|| {
            found(&["PET_NODE_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"], problems)
        });
        let nodes = flag("--nodes", &self.nodes, 1, problems)
            .or_else(|| found(&["PET_NNODES", "SLURM_STEP_NUM_TASKS"], problems))
            .unwrap_or(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
        let each = flag("--ranks-per-node", &self.ranks_per_node, 1, problems);
        let each = each.or_else(|| match variables.get("PET_NPROC_PER_NODE").map(String::as_str) {
            Some("auto" | "cpu") | None => Some(cores),
            Some("gpu") => Some(paceline_exec::gpus().map_or(0, |gpus| gpus.len()) as u32),
            Some(_) => found(&["PET_NPROC_PER_NODE"], problems),
        });
        let index = match (index, nodes) {
            (Some(index), nodes) if index >= nodes => {
                problems.add("--node-index", format!("{index} is not one of {nodes} hosts"));
                return None;
            }
            (None, 2..) => {
                problems.add("--node-index", format!("which of {nodes} hosts is this one?"));
                return None;
            }
            (index, _) => index.unwrap_or(0),
        };
        let slurm = slurm_job(variables);
        let address = self.address.clone().or_else(|| master_address(variables));
        let address = address.or_else(|| slurm_first_host(variables));
        let address = match (address, nodes) {
            (Some(address), _) => address,
            (None, 1) => "127.0.0.1".to_owned(),
            (None, _) => {
                problems.add("--address", "is needed: the first host, where all ranks meet");
                return None;
            }
        };
        let port = whole("--port", self.port.as_deref(), 1..=65535, problems);
        let named = master_port(variables);
        let named = named.map_err(|error| problems.add("the environment", error.to_string()));
        let port = port.map(|port| port as u16).or(named.ok().flatten());
        let port = port.unwrap_or_else(|| slurm.as_deref().map_or(USUAL_PORT, port_of));
        if self.arguments.first().map(String::as_str) != Some("train") {
            problems.add("--", "a training run follows: -- train --model NAME …");
        }
        let restarts = flag("--max-restarts", &self.max_restarts, 0, problems).unwrap_or(0);
        let arguments = with_json(&self.arguments, self.json);
        Some(StaticAgent { index, nodes, each: each?, address, port, restarts, arguments })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(variables: &[(&str, &str)]) -> Result<StaticAgent, String> {
        let flags = Flags {
            stdio: false,
            nodes: None,
            node_index: None,
            ranks_per_node: None,
            address: None,
            port: None,
            max_restarts: None,
            json: false,
            arguments: vec!["train".into()],
        };
        let map = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        let mut problems = Problems::default();
        let agent = flags.check(&map.collect(), &mut problems);
        agent.filter(|_| problems.is_empty()).ok_or_else(|| problems.to_string())
    }

    #[test]
    fn variables_of_kubeflow_and_slurm_are_enough() {
        let agent = checked(&[
            ("PET_NNODES", "2"),
            ("PET_NODE_RANK", "1"),
            ("PET_NPROC_PER_NODE", "4"),
            ("PET_MASTER_ADDR", "set-node-0-0.set"),
            ("PET_MASTER_PORT", "29400"),
        ]);
        let agent = agent.unwrap();
        assert_eq!((agent.index, agent.nodes, agent.each), (1, 2, 4));
        assert_eq!((agent.address.as_str(), agent.port), ("set-node-0-0.set", 29400));
        let agent = checked(&[
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_NODELIST", "n[1-2]"),
            ("SLURM_JOB_ID", "7"),
        ]);
        let agent = agent.unwrap();
        assert_eq!((agent.index, agent.nodes, agent.address.as_str()), (1, 2, "n1"));
    }

    #[test]
    fn what_an_agent_lacks_is_named() {
        assert!(checked(&[("PET_NNODES", "2")]).unwrap_err().contains("--node-index"));
        let two = [("PET_NNODES", "2"), ("PET_NODE_RANK", "1")];
        assert!(checked(&two).unwrap_err().contains("--address"));
        let beyond = [("PET_NNODES", "2"), ("PET_NODE_RANK", "2")];
        assert!(checked(&beyond).unwrap_err().contains("not one of 2 hosts"));
    }
}
