//! The conformance suite that every store driver must pass.
