"""The claims, a module for each paper and one for ours."""

from proof.claims import caraserve, edgellm, elora, faults, holobiont, masking, symbiosis

GROUPS = (caraserve.GROUP, elora.GROUP, edgellm.GROUP, symbiosis.GROUP, faults.GROUP, masking.GROUP, holobiont.GROUP)
