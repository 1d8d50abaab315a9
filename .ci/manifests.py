"""Checks a JobSet and a TrainJob against the schemas of Kubernetes and of their resources.

Core types come from the package kubernetes-validate, the two resources from kubeflow-trainer-api, which is
generated from their definitions. A field that no schema knows is an error.
"""

import json
import sys

import kubeflow_trainer_api.models as models
import kubernetes_validate


def unknown(given, known, where=""):
    """Fields of a document that are lost when its type reads and writes it."""
    if isinstance(given, dict):
        if not isinstance(known, dict):
            return [where]
        found = [f"{where}.{key}" for key in given if key not in known]
        for key in given.keys() & known.keys():
            found += unknown(given[key], known[key], f"{where}.{key}")
        return found
    if isinstance(given, list):
        pairs = zip(given, known or [])
        return [lost for at, (a, b) in enumerate(pairs) for lost in unknown(a, b, f"{where}[{at}]")]
    return []


def check(path, kind):
    with open(path) as file:
        document = json.load(file)
    read = kind.from_dict(document)
    lost = unknown(document, json.loads(json.dumps(read.to_dict(), default=str)))
    if lost:
        sys.exit(f"{path}: no schema knows {', '.join(lost)}")
    return document


job_set = check(sys.argv[1], models.JobsetV1alpha2JobSet)
train_job = check(sys.argv[2], models.TrainerV1alpha1TrainJob)

# The core parts, strictly: the jobs of the set, and the container that the runtime makes of the trainer.
for part in job_set["spec"]["replicatedJobs"]:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}, **part["template"]}
    kubernetes_validate.validate(job, "1.31", strict=True)
trainer = train_job["spec"]["trainer"]
node = train_job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
pod = node["template"]["spec"]["template"]["spec"]
container = {
    "name": "node",
    "image": trainer["image"],
    "command": trainer["command"],
    "env": trainer["env"],
    "resources": trainer["resourcesPerNode"],
    "volumeMounts": pod["containers"][0]["volumeMounts"],
}
spec = {"containers": [container], "volumes": pod["volumes"]}
kubernetes_validate.validate(
    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": spec}, "1.31", strict=True
)
print("manifests fit the schemas: JobSet, TrainJob")
