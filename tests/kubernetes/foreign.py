"""Schemas of kinds that no package describes: the fields of the published definitions that the manifests use.

The definitions are those of the Gateway API 1.x, its inference extension 1.0, the Prometheus operator and KEDA 2.17 or later.
An object with any other field fails, so a misspelt field is found.
"""

TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}


def closed(required, optional=None):
    fields = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": fields, "additionalProperties": False}


def one_or_more(items):
    return {"type": "array", "items": items, "minItems": 1}


def kind(api_version, spec):
    metadata = closed({"name": TEXT, "namespace": TEXT}, {"labels": LABELS})
    return closed({"apiVersion": {"const": api_version}, "kind": TEXT, "metadata": metadata, "spec": spec})


SCALING_RULES = closed(
    {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "policies": one_or_more(
            closed(
                {
                    "type": {"enum": ["Pods", "Percent"]},
                    "value": {"type": "integer", "minimum": 1},
                    "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
                }
            )
        ),
    }
)

PROMETHEUS_TRIGGER = closed(
    {
        "type": {"const": "prometheus"},
        "name": TEXT,
        "metricType": {"enum": ["AverageValue", "Value"]},
        # KEDA takes all of them as strings.
        "metadata": closed(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": TEXT,
                "threshold": {"type": "string", "pattern": "^[0-9]+$"},
            },
            {"ignoreNullValues": {"enum": ["true", "false"]}},
        ),
    }
)

SCHEMAS = {
    "InferencePool": kind(
        "inference.networking.k8s.io/v1",
        closed(
            {
                "selector": closed({"matchLabels": LABELS}),
                "targetPorts": one_or_more(closed({"number": PORT})),
                "endpointPickerRef": closed(
                    {"name": TEXT, "port": closed({"number": PORT})},
                    {"failureMode": {"enum": ["FailOpen", "FailClose"]}},
                ),
            }
        ),
    ),
    "HTTPRoute": kind(
        "gateway.networking.k8s.io/v1",
        closed(
            {
                "parentRefs": one_or_more(closed({"name": TEXT, "namespace": TEXT})),
                "rules": one_or_more(
                    closed(
                        {
                            "matches": one_or_more(
                                closed({"path": closed({"type": {"const": "PathPrefix"}, "value": TEXT})})
                            ),
                            "backendRefs": one_or_more(closed({"group": TEXT, "kind": TEXT, "name": TEXT})),
                            "timeouts": closed({"request": DURATION}),
                        }
                    )
                ),
            },
            {"hostnames": one_or_more(TEXT)},
        ),
    ),
    "ServiceMonitor": kind(
        "monitoring.coreos.com/v1",
        closed(
            {
                "selector": closed({"matchLabels": LABELS}),
                "endpoints": one_or_more(
                    closed(
                        {"port": TEXT, "path": {"const": "/metrics"}, "interval": DURATION},
                        {
                            "authorization": closed(
                                {"type": {"const": "Bearer"}, "credentials": closed({"name": TEXT, "key": TEXT})}
                            )
                        },
                    )
                ),
            }
        ),
    ),
    "ScaledObject": kind(
        "keda.sh/v1alpha1",
        closed(
            {
                "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}),
                "minReplicaCount": COUNT,
                "maxReplicaCount": COUNT,
                "pollingInterval": COUNT,
                "fallback": closed(
                    {
                        "failureThreshold": COUNT,
                        "replicas": COUNT,
                        "behavior": {
                            "enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]
                        },
                    }
                ),
                "advanced": closed(
                    {
                        "horizontalPodAutoscalerConfig": closed(
                            {"behavior": closed({"scaleUp": SCALING_RULES, "scaleDown": SCALING_RULES})}
                        )
                    }
                ),
                "triggers": one_or_more(PROMETHEUS_TRIGGER),
            }
        ),
    ),
}
