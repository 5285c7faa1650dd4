{{- define "dps-router.fullname" -}}
{{- $name := include "dps-router.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "dps-router.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "dps-router.selector" -}}
app.kubernetes.io/name: {{ include "dps-router.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "dps-router.ownLabels" -}}
{{ include "dps-router.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "dps-router.labels" -}}
{{ include "dps-router.ownLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dps-router.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "dps-router.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name must be set when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* The registry of all images, followed by a slash; empty if it is not set. */ -}}
{{- define "dps-router.registry" -}}
{{- with .Values.global.imageRegistry -}}{{ trimSuffix "/" . }}/{{- end -}}
{{- end -}}

{{- define "dps-router.image" -}}
{{- if .Values.image.digest -}}
{{ include "dps-router.registry" . }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ include "dps-router.registry" . }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "dps-router.gatewayImage" -}}
{{- if .Values.gatewayImage.digest -}}
{{ include "dps-router.registry" . }}{{ .Values.gatewayImage.repository }}@{{ .Values.gatewayImage.digest }}
{{- else -}}
{{ include "dps-router.registry" . }}{{ .Values.gatewayImage.repository }}:{{ .Values.gatewayImage.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "dps-router.labImage" -}}
{{- if .Values.labImage.digest -}}
{{ include "dps-router.registry" . }}{{ .Values.labImage.repository }}@{{ .Values.labImage.digest }}
{{- else -}}
{{ include "dps-router.registry" . }}{{ .Values.labImage.repository }}:{{ .Values.labImage.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* The operator's permissions in the namespaces that it watches. */ -}}
{{- define "dps-router.rules" -}}
- apiGroups: [dpsrouter.io]
  resources: [dpsrouters]
  verbs: [get, list, watch]
- apiGroups: [dpsrouter.io]
  resources: [dpsrouters/status]
  verbs: [get, patch]
# Required for owner references with blockOwnerDeletion if OwnerReferencesPermissionEnforcement is enabled.
- apiGroups: [dpsrouter.io]
  resources: [dpsrouters/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts, services]
  verbs: &all [get, list, watch, create, patch, delete]
# The passwords that the operator generates are in one Secret of this name per namespace. It cannot access any other
# Secret: the API server checks the name for creation as well, because the operator creates it by server-side apply.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [dps-router-credentials]
  verbs: [get, create, patch]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: *all
- apiGroups: [batch]
  resources: [cronjobs]
  verbs: *all
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: *all
- apiGroups: [networking.k8s.io]
  resources: [ingresses, networkpolicies]
  verbs: *all
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: *all
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: *all
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: *all
- apiGroups: [monitoring.coreos.com]
  resources: [servicemonitors]
  verbs: *all
# Pods are read to diagnose them.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
# The operator grants this permission to the gateways, so it must have it.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end -}}
