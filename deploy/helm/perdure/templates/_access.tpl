{{/* The worker's rights at the API server; docs/kubernetes.md has the same table. */}}
{{- define "perdure.rules" -}}
# A node is a pod: created once. Of what it is, only its memory changes, after that has run out; before it is deleted it
# loses the labels by which others find it.
- apiGroups: [""]
  resources: [pods]
  verbs: [create, get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/resize]
  verbs: [patch]
# A job's anchor, which owns its pods, and uploaded code, whose owner is set to the anchor by a patch.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, get, list, patch, delete]
# Warnings about pods that do not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
# The names of the nodes of a job of several roles.
- apiGroups: [""]
  resources: [services]
  verbs: [create, get]
{{- $groups := dict "volcano" "scheduling.volcano.sh" "coscheduling" "scheduling.x-k8s.io" "workload" "scheduling.k8s.io" }}
{{- with get $groups (.Values.gangs.system | default "") }}
# The requirements of the site's gang system: docs/gangs.md.
- apiGroups: [{{ . }}]
  resources: [podgroups]
  verbs: [create, get{{ if ne $.Values.gangs.system "workload" }}, patch{{ end }}]
{{- end }}
{{- end }}

{{/* The operator's rights at the API server; docs/kubernetes-resource.md has the same table. */}}
{{- define "perdure.operatorRules" -}}
- apiGroups: [perdure.dev]
  resources: [trainingjobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [perdure.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
# Without effect where DLRover's ScalePlans are not defined.
- apiGroups: [elastic.iml.github.io]
  resources: [scaleplans]
  verbs: [list, watch, patch]
- apiGroups: [elastic.iml.github.io]
  resources: [scaleplans/status]
  verbs: [patch]
# Whether an object's owner may use what the job names.
- apiGroups: [authorization.k8s.io]
  resources: [localsubjectaccessreviews]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, get, patch]
{{- end }}

{{/* The page's rights at the API server; docs/page.md has the same table. */}}
{{- define "perdure.pageRules" -}}
# What its users may do.
- apiGroups: [authorization.k8s.io]
  resources: [localsubjectaccessreviews]
  verbs: [create]
{{- end }}

{{/* Grants rules in the namespaces that jobs may run in; takes (dict "root" $ "component" NAME "rules" TEXT). */}}
{{- define "perdure.access" -}}
{{- $values := .root.Values }}
{{- if and $values.allNamespaces $values.jobNamespaces }}
{{- fail "jobNamespaces names namespaces, and allNamespaces is true: leave jobNamespaces empty, or allNamespaces false" }}
{{- end }}
{{- $labels := include "perdure.labels" . }}
{{- $subject := printf "{kind: ServiceAccount, name: %s, namespace: %s}" (include "perdure.name" .) .root.Release.Namespace }}
{{- $rules := .rules }}
{{- if $values.allNamespaces }}
{{- $name := include "perdure.uniqueName" . }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
rules: {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $name }}}
subjects: [{{ $subject }}]
{{- else }}
{{- $name := include "perdure.jobsName" . }}
{{- range $namespace := $values.jobNamespaces | default (list .root.Release.Namespace) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ $namespace }}
  labels: {{- $labels | nindent 4 }}
rules: {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ $namespace }}
  labels: {{- $labels | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects: [{{ $subject }}]
{{- end }}
{{- end }}
{{- end }}
