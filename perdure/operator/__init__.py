"""The operator: jobs as objects of a Kubernetes cluster. Each `TrainingJob` becomes a workflow, and its status mirrors
it.

The object is the desired state, and the workflow is the job; the operator between them keeps no state. It can end at
any time and start again: jobs continue, and it then handles the changes that it missed.

| module | content |
|-|-|
| `crd`, `structural` | the definition of the resource, generated from the specification's models |
| `resource`, `status` | the object as it is read, and its status |
| `changes` | the differences between a running job and a new specification |
| `owners`, `ownership`, `references` | whether the object's owner may use what the job names |
| `events` | Kubernetes Events about objects |
| `runs` | requests to Temporal |
| `reconcile` | reconciling one object with its run |
| `workqueue`, `operator` | the order and the time of reconciling |
| `serve` | the process that `perdure operator` runs |
"""
