{{/* Templates that take (dict "root" $ "component" NAME); each component has a Deployment of its own. */}}

{{- define "perdure.name" -}}
{{ .root.Values.nameOverride | default .root.Release.Name }}-{{ .component }}
{{- end }}

{{/* Name of cluster-scoped objects. */}}
{{- define "perdure.uniqueName" -}}
{{ .root.Release.Namespace }}-{{ include "perdure.name" . }}
{{- end }}

{{/* Name of objects in a namespace that jobs run in: the same in every release, so that Helm refuses a second release for
such a namespace. Two tenants in one namespace could use each other's Secrets. */}}
{{- define "perdure.jobsName" -}}
perdure-jobs-{{ .component }}
{{- end }}

{{- define "perdure.selectorLabels" -}}
app.kubernetes.io/name: perdure
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "perdure.labels" -}}
{{ include "perdure.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of a component's pods. */}}
{{- define "perdure.podLabels" -}}
{{ include "perdure.selectorLabels" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Templates that take the root. */}}

{{/* `helm upgrade --reuse-values` takes the defaults of the release's former chart for those of this one. */}}
{{- define "perdure.refuseEarlierDefaults" -}}
{{- range list "cluster" "history" "notificationSecrets" "page" }}
{{- if not (hasKey $.Values .) }}
{{- fail (printf "the values are those of an earlier chart, which had no %s: use --reset-then-reuse-values instead of --reuse-values (helm 3.14 or newer)" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "perdure.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "perdure.gatewayAddress" -}}
{{- .Values.gateway.address | default (printf "%s.%s.svc:7433" (include "perdure.name" (dict "root" $ "component" "gateway")) .Release.Namespace) }}
{{- end }}

{{/* Temporal's own variables, for every component that connects to it. */}}
{{- define "perdure.temporalEnv" -}}
- {name: TEMPORAL_ADDRESS, value: {{ .Values.temporal.address | quote }}}
- {name: TEMPORAL_NAMESPACE, value: {{ .Values.temporal.namespace | quote }}}
- {name: PERDURE_TASK_QUEUE, value: {{ .Values.temporal.taskQueue | quote }}}
- {name: PERDURE_LOG_FORMAT, value: {{ .Values.logFormat | quote }}}
{{- if .Values.temporal.tls.enabled }}
- {name: TEMPORAL_TLS, value: "true"}
{{- end }}
{{- with .Values.temporal.tls.serverName }}
- {name: TEMPORAL_TLS_SERVER_NAME, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "perdure.temporalEnvFrom" -}}
{{- with .Values.temporal.secret }}
- secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* The keys of encrypted payloads, for every component that reads what Temporal stores. */}}
{{- define "perdure.payloadKeysEnv" -}}
{{- if .Values.temporal.payloadKeysSecret }}
- {name: PERDURE_PAYLOAD_KEYS_FILE, value: /etc/perdure-payload-keys/keys.json}
{{- end }}
{{- end }}

{{- define "perdure.payloadKeysMount" -}}
{{- if .Values.temporal.payloadKeysSecret }}
- {name: payload-keys, mountPath: /etc/perdure-payload-keys, readOnly: true}
{{- end }}
{{- end }}

{{- define "perdure.payloadKeysVolume" -}}
{{- with .Values.temporal.payloadKeysSecret }}
- name: payload-keys
  secret: {secretName: {{ . | quote }}, defaultMode: 288}
{{- end }}
{{- end }}

{{- define "perdure.podSecurityContext" -}}
{{ toYaml .Values.podSecurityContext }}
{{- end }}

{{- define "perdure.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The names of Secrets and service accounts that no job may use, for the site policy. */}}
{{- define "perdure.ownSecrets" -}}
{{- $names := list (include "perdure.name" (dict "root" $ "component" "gateway")) }}
{{- $names = concat $names (list .Values.temporal.secret .Values.temporal.payloadKeysSecret .Values.gateway.tls.secret .Values.page.tls.secret .Values.history.secret) }}
{{- range .Values.notificationSecrets }}
{{- $names = append $names .secret }}
{{- end }}
{{- range concat .Values.env .Values.gateway.env .Values.operator.env .Values.page.env }}
{{- $names = append $names (dig "valueFrom" "secretKeyRef" "name" "" .) }}
{{- end }}
{{- range concat .Values.volumes .Values.gateway.volumes .Values.operator.volumes .Values.page.volumes }}
{{- $names = append $names (dig "secret" "secretName" "" .) }}
{{- end }}
{{- $names | compact | uniq | join "," }}
{{- end }}

{{- define "perdure.ownAccounts" -}}
{{- range $index, $component := list "worker" "gateway" "operator" "page" "keyring" }}
{{- if $index }},{{ end }}{{ include "perdure.name" (dict "root" $ "component" $component) }}
{{- end }}
{{- end }}
