{{- define "holobiont.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "holobiont.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{/* Labels of pods; the argument is a list of the root and the component. Selectors use `app`. */}}
{{- define "holobiont.podLabels" -}}
{{- $root := index . 0 -}}
app: {{ include "holobiont.fullname" $root }}-{{ index . 1 }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end -}}

{{/* Labels of other objects; the argument is a list of the root and the component, or of the root alone. */}}
{{- define "holobiont.labels" -}}
{{- $root := index . 0 -}}
{{- if gt (len .) 1 -}}
{{ include "holobiont.podLabels" . }}
{{ else -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{ end -}}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{- define "holobiont.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "holobiont.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* Image, pull policy and command of a container; the argument is a list of the root and the program. */}}
{{- define "holobiont.program" -}}
{{- $root := index . 0 -}}
image: {{ include "holobiont.image" $root | quote }}
{{- with $root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
command: ["/usr/lib/holobiont/{{ index . 1 }}"]
{{- end -}}

{{/* Variables of a container as a list; the argument is a map. */}}
{{- define "holobiont.env" -}}
{{- range $name, $value := . }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- end -}}

{{/* Source of a read-only volume; the argument has `claim` and `volume`. */}}
{{- define "holobiont.volume" -}}
{{- if .volume -}}
{{- toYaml .volume -}}
{{- else -}}
persistentVolumeClaim: { claimName: {{ .claim }}, readOnly: true }
{{- end -}}
{{- end -}}

{{/* Sources of a network policy, from namespaces that send requests. An empty list of sources would mean all. */}}
{{- define "holobiont.clients" -}}
{{- $namespaces := .Values.networkPolicy.clientNamespaces -}}
{{- if .Values.route.enabled -}}
{{- $namespaces = prepend $namespaces .Values.route.gateway.namespace -}}
{{- end -}}
{{- range $namespaces | uniq }}
- namespaceSelector:
    matchLabels: { kubernetes.io/metadata.name: {{ . }} }
{{- end -}}
{{- end -}}

{{/* Egress to the cluster's DNS. */}}
{{- define "holobiont.dnsEgress" -}}
- to:
    - namespaceSelector:
        matchLabels: { kubernetes.io/metadata.name: kube-system }
      podSelector:
        matchLabels: { k8s-app: kube-dns }
  ports:
    - { protocol: UDP, port: 53 }
    - { protocol: TCP, port: 53 }
{{- end -}}
