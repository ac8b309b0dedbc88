"""Jobs as objects of a Kubernetes cluster: each `TrainingJob` becomes a workflow, and its status mirrors it.

The object is the desired state, and the workflow is the job: the operator between them holds nothing. It can die at any
time and start again; jobs continue, and it sees what it missed when it is back.

| module | what it holds |
|-|-|
| `crd`, `structural` | the definition of the resource, generated from the specification's models |
| `resource`, `status` | the object as it is read, and what its status says |
| `changes` | what of a running job a new specification would change |
| `runs` | what is asked of Temporal |
| `reconcile` | one object and its run brought together |
| `workqueue`, `operator` | which object is looked at when |
| `serve` | the process that `perdure operator` runs |
"""
