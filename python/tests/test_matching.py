"""Names of modules and names of the catalog. Needs no torch and no executor."""

from __future__ import annotations

import pytest

from holobiont.endpoint import LocalEndpoint, TlsEndpoint, parse_endpoint
from holobiont.errors import EndpointError
from holobiont.name_matching import Layer, Match, match_layers
from holobiont.protocol import Catalog, Part, Site


def catalog(*names, inputs=4, outputs=8, bias=0):
    """A site for each name."""
    sites = tuple(Site(inputs, 7, (Part(name, outputs, bias),)) for name in names)
    return Catalog("m", "a", bytes(32), 0, 0, 0, sites, ())


def matched(names, *listed):
    return match_layers([Layer(name, 4, 8, False) for name in names], catalog(*listed))


def test_prefixes_of_wrappers_and_files_do_not_matter():
    listed = ["h.0.attn.c_attn", "h.1.attn.c_attn"]
    found = matched(["base_model.model.transformer.h.1.attn.c_attn.base_layer", "transformer.h.0.attn.c_attn"], *listed)
    assert list(found.values()) == [Match(1, 0), Match(0, 0)]
    assert matched(["layers.0.q_proj"], "model.layers.0.q_proj") == {"layers.0.q_proj": Match(0, 0)}


def test_layer_three_is_never_layer_thirteen():
    assert matched(["model.layers.3.q_proj"], "model.layers.13.q_proj") == {"model.layers.3.q_proj": "not in the catalog"}
    assert matched(["a.3.q_proj"], "b.4.c.3.q_proj") == {"a.3.q_proj": "not in the catalog"}


def test_every_number_must_lie_in_the_common_end():
    assert matched(["experts.1.layers.0.up"], "experts.2.layers.0.up")["experts.1.layers.0.up"] == "not in the catalog"
    assert matched(["a.0.b.up"], "a.0.c.up")["a.0.b.up"] == "not in the catalog"


def test_the_more_alike_module_wins_and_the_other_stays():
    text, vision = "language_model.model.layers.0.q_proj", "vision_tower.encoder.layers.0.q_proj"
    found = matched([vision, text], "model.layers.0.q_proj")
    assert found[text] == Match(0, 0)
    assert "more like" in found[vision]


def test_two_that_are_equally_alike_both_stay():
    found = matched(["left.layers.0.q", "right.layers.0.q"], "model.layers.0.q")
    assert all("as like" in reason for reason in found.values())


def test_a_layer_that_is_several_in_the_catalog_is_all_of_its_site():
    sites = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj")]
    of = [tuple(Part(f"model.layers.3.m.{name}", 8, 0) for name in names) for names in sites]
    listed = Catalog("m", "a", bytes(32), 0, 0, 0, tuple(Site(4, 7, parts) for parts in of), ())
    layers = [Layer("layers.3.m.qkv_proj", 4, 24, False), Layer("layers.3.m.gate_up_proj", 4, 16, False)]
    assert list(match_layers(layers, listed).values()) == [Match(0, None), Match(2, None)]
    assert "the catalog has 4 and 24" in match_layers([Layer("layers.3.m.qkv_proj", 4, 25, False)], listed)["layers.3.m.qkv_proj"]
    assert match_layers([Layer("layers.4.m.qkv_proj", 4, 24, False)], listed) == {"layers.4.m.qkv_proj": "not in the catalog"}


def test_shapes_and_biases_must_agree():
    listed = catalog("lm_head", inputs=4, outputs=9)
    assert "8 outputs" in match_layers([Layer("lm_head", 4, 8, False)], listed)["lm_head"]
    listed = catalog("fc", bias=1)
    assert "no bias" in match_layers([Layer("fc", 4, 8, False)], listed)["fc"]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tls://gpu.example.org:7777", TlsEndpoint("gpu.example.org", 7777)),
        ("tls://[::1]:7777", TlsEndpoint("::1", 7777)),
        ("ipc:///run/x/layers.zmq", LocalEndpoint("/run/x/layers.zmq")),
        ("/run/x/layers.zmq", LocalEndpoint("/run/x/layers.zmq")),
    ],
)
def test_endpoints_are_read(text, endpoint):
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["tcp://h:1", "tls://h", "tls://:1", "tls://h:99999", "tls://h:1/x", "ipc://x", "h:1", ""])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(EndpointError):
        parse_endpoint(text)
