"""Generates the reference of the site policy, `docs/site-policy.md`, from its model."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from perdure.activities.nodes.kubernetes.site_policy import ORDINARY_FIELDS, SitePolicy
from perdure.spec.docstrings import field_docstrings

_INTRODUCTION = """\
# The site policy

A job describes its pods, and the worker creates them with rights that the job's user may not have. The site policy
limits what a pod may request. The worker checks the complete pod at the moment when it would create it, so the policy
holds for each job, however its workflow was started. A job that exceeds the policy fails once, with a reason that names
each field, its value and the rule:

```
spec.hostPID: got true; the site's policy allows none (host_namespaces)
```

Everything that gives power over a machine, the cluster or other users is denied unless the policy allows it. The
defaults run ordinary training jobs. A site that uses RDMA, for example, sets in the chart's values:

```yaml
sitePolicy:
  capabilities: [IPC_LOCK]
  host_paths: [/dev/infiniband]
```

Outside the chart, `PERDURE_KUBERNETES_POLICY_FILE` names a YAML file with these fields for the worker. A worker does
not start with a policy that it cannot read. Names are glob patterns, such as `team-*`; a pattern that begins with `!`
excludes what others include. `perdure doctor` shows the policy in force, as a worker reports it; its JSON (`-o json`)
has the fields under `facts`. A [preset](kubernetes.md#presets) may allow more to the namespaces that may use it.

The policy is complete by construction. One table, `activities/nodes/kubernetes/pod_fields.py`, has a decision on every
field that a pod can have in Kubernetes' API; a field that it does not have is refused, also where `template_fields` has
all that is above it. So a new release of Kubernetes opens no way around the policy, and its new fields can be used once
a release of Perdure knows them. PodSecurity's level `restricted` is the floor: a pod that the default policy allows
runs in a namespace that enforces it.

Labels, annotations, priority classes and tolerations are powers over other users: a Service of another application
selects by labels, annotations grant cloud roles and networks, priority preempts, and a toleration enters machines that
are kept for others. The defaults allow common ones. A list replaces the default, so a site repeats what it keeps of it:

```yaml
sitePolicy:
  labels: [project, team, acme.org/*]
  priority_classes: [research-*]
  tolerations: [nvidia.com/gpu, acme.org/gpu-pool]
```

What the worker itself sets, such as the labels of the site's [gang system](gangs.md), needs no permission. Some fields
below those in `template_fields` are allowed only by their own whole path, with or without the names of containers and
volumes: `spec.volumes.ephemeral.volumeClaimTemplate.spec.volumeName`, for example, which takes a certain volume of the
cluster.

`max_nodes` and `max_gpus` hold for all workers together: each takes a place in the ConfigMap `perdure-limits` of the
namespace before it creates a pod, and keeps it there for about a minute. GPUs are counted as schedulers do, with those
of sidecars and init containers. For limits that also hold for pods of others, create a ResourceQuota; a job that meets
one waits.

Whatever the policy says, no job may change Perdure's own containers and volumes, except for what its agents need to
copy logs to the job's storage: `resources` (of `perdure-prepare` as well), mounts beneath `/mnt`, and the variables of
`agent_variables`. None of its
init containers may mount the volume `perdure`, in which the agent and training code meet. No job may use the Secret
with the worker's own connection, nor, in the worker's namespace, the control plane's other Secrets and its service
accounts: the chart passes their names to the worker, and
[`PERDURE_KUBERNETES_RESERVED_SECRETS`](kubernetes.md#the-worker) does so without it. Those in the values'
`imagePullSecrets` are not among them. No pod of a job may have the label `app.kubernetes.io/name: perdure`, by which
Services select the control plane's pods.

| Field | Default | Meaning |
|-|-|-|
"""

_FIELDS = """
An anti-affinity to pods that a template *requires* holds for pods of the same job: the scheduler would keep other pods
of the namespace away from its machines, too. A preferred one keeps none away.

By default `template_fields` has these fields of a pod template: {fields}.
"""


def reference() -> str:
    """Returns the page's content."""
    texts = field_docstrings(SitePolicy)
    rows = (
        f"| `{name}` | {_default(name, field)} | {_meaning(field, texts[name])} |"
        for name, field in SitePolicy.model_fields.items()
    )
    fields = ", ".join(f"`{field}`" for field in ORDINARY_FIELDS)
    return _INTRODUCTION + "\n".join(rows) + "\n" + _FIELDS.format(fields=fields)


def _default(name: str, field: FieldInfo) -> str:
    if name == "template_fields":
        return "see below"
    value = to_jsonable_python(field.get_default())
    if isinstance(value, list):
        return ", ".join(f"`{one}`" for one in value) or "none"
    return "unset" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(field: FieldInfo, docstring: str) -> str:
    text = " ".join(docstring.split())
    (inner, *_) = get_args(field.annotation) or (None,)
    if get_origin(inner) is Literal:
        text += f" One or more of {', '.join(f'`{one}`' for one in get_args(inner))}."
    return text.replace("|", "\\|")
