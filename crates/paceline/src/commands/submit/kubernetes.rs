//! Manifests for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer.

use super::{Flags, Job, is_size};
use crate::flags::Problems;
use serde_json::{Value, json};
use std::path::Path;

/// The manifest, as JSON, which is YAML too.
pub(super) fn manifest(job: &Job, flags: &Flags, problems: &mut Problems) -> String {
    for (flag, given) in [
        ("--time", &flags.time),
        ("--partition", &flags.partition),
        ("--signal-before", &flags.signal_before),
    ] {
        if given.is_some() {
            problems.add(flag, "goes with --to slurm");
        }
    }
    const UNITS: [&str; 10] = ["k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi"];
    if let Some(memory) = job.memory.as_ref().filter(|text| !is_size(text, &UNITS)) {
        problems.add("--memory", format!("'{memory}' is none of Kubernetes' sizes, such as 64Gi"));
    }
    let mut needed = |flag, given: &Option<String>, what: &str| {
        given.clone().unwrap_or_else(|| {
            problems.add(flag, format!("is needed: {what}"));
            String::new()
        })
    };
    let image = needed("--image", &flags.image, "the image with this program");
    let claim = needed("--volume", &flags.volume, "the claim of a volume that all pods share");
    let secret = flags.secret.clone().unwrap_or_else(|| format!("{}-secret", job.name));
    let mount = Path::new(&job.out).parent().filter(|above| above.is_absolute());
    let mount = mount.and_then(Path::to_str).filter(|mount| *mount != "/").unwrap_or_else(|| {
        problems.add("--out", "must lie in the volume: /checkpoints/run mounts it at /checkpoints");
        ""
    });
    let pod = Pod { job, image, claim, secret, mount };
    let document = match flags.kind.as_deref() {
        None | Some("jobset") => pod.job_set(),
        Some("trainjob") => pod.train_job(),
        Some(other) => {
            problems.add("--kind", format!("'{other}' is neither jobset nor trainjob"));
            Value::Null
        }
    };
    let text = serde_json::to_string_pretty(&document).unwrap_or_default();
    format!("{text}\n")
}

/// Settings common to the pods of both kinds.
struct Pod<'a> {
    job: &'a Job,
    image: String,
    claim: String,
    secret: String,
    mount: &'a str,
}

/// Port on which ranks meet: a pod has an address of its own.
const PORT: u16 = 29500;

impl Pod<'_> {
    /// Command of a container: an agent, which starts the pod's ranks.
    fn command(&self) -> Vec<String> {
        let Job { nodes, each, arguments, .. } = self.job;
        let agent = ["paceline", "agent", "--nodes"].map(str::to_owned);
        let counts =
            [nodes.to_string(), "--ranks-per-node".to_owned(), each.to_string(), "--".to_owned()];
        agent.into_iter().chain(counts).chain(arguments.iter().cloned()).collect()
    }

    fn resources(&self) -> Value {
        let Job { each, cores, gpus, memory, .. } = self.job;
        let mut limits = json!({ "cpu": (each * cores).to_string() });
        if let Some(memory) = memory {
            limits["memory"] = json!(memory);
        }
        if *gpus > 0 {
            limits["nvidia.com/gpu"] = json!(gpus.to_string());
        }
        json!({ "requests": limits, "limits": limits })
    }

    fn secret_variable(&self) -> Value {
        let from = json!({ "secretKeyRef": { "name": self.secret, "key": "secret" } });
        json!({ "name": "PACELINE_SECRET", "valueFrom": from })
    }

    fn volume(&self) -> Value {
        json!({ "name": "checkpoints", "persistentVolumeClaim": { "claimName": self.claim } })
    }

    fn volume_mount(&self) -> Value {
        json!({ "name": "checkpoints", "mountPath": self.mount })
    }

    /// A JobSet with one indexed job; all pods start again together if one fails.
    fn job_set(&self) -> Value {
        let Job { name, nodes, .. } = self.job;
        let first = format!("{name}-ranks-0-0.{name}");
        let container = json!({
            "name": "ranks",
            "image": self.image,
            "command": self.command(),
            "env": [
                { "name": "MASTER_ADDR", "value": first },
                { "name": "MASTER_PORT", "value": PORT.to_string() },
                self.secret_variable(),
            ],
            "ports": [{ "containerPort": PORT }],
            "resources": self.resources(),
            "volumeMounts": [self.volume_mount()],
        });
        json!({
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": { "name": name },
            "spec": {
                "failurePolicy": { "maxRestarts": 10 },
                "network": { "enableDNSHostnames": true, "subdomain": name },
                "replicatedJobs": [{
                    "name": "ranks",
                    "replicas": 1,
                    "template": { "spec": {
                        "completionMode": "Indexed",
                        "parallelism": nodes,
                        "completions": nodes,
                        "backoffLimit": 0,
                        "template": { "spec": {
                            "restartPolicy": "Never",
                            "terminationGracePeriodSeconds": 120,
                            "containers": [container],
                            "volumes": [self.volume()],
                        } },
                    } },
                }],
            },
        })
    }

    /// A TrainJob, whose runtime sets PET_* for its pods.
    fn train_job(&self) -> Value {
        let Job { name, nodes, each, .. } = self.job;
        // The runtime's pods lack the volume.
        let pods = json!({
            "volumes": [self.volume()],
            "containers": [{ "name": "node", "volumeMounts": [self.volume_mount()] }],
        });
        let node =
            json!({ "name": "node", "template": { "spec": { "template": { "spec": pods } } } });
        json!({
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": { "name": name },
            "spec": {
                "runtimeRef": {
                    "apiGroup": "trainer.kubeflow.org",
                    "kind": "ClusterTrainingRuntime",
                    "name": "torch-distributed",
                },
                "trainer": {
                    "image": self.image,
                    "command": self.command(),
                    "numNodes": nodes,
                    "numProcPerNode": each,
                    "env": [self.secret_variable()],
                    "resourcesPerNode": self.resources(),
                },
                "runtimePatches": [{
                    "manager": "paceline/submit",
                    "trainingRuntimeSpec": {
                        "template": { "spec": { "replicatedJobs": [node] } },
                    },
                }],
            },
        })
    }
}
