//! The circles that are allowed, until they are removed.

/// This file, for messages.
pub(crate) const FILE: &str = "xtask/src/gates/circles/known.rs";

/// The files of each circle, in order.
pub(crate) const KNOWN: &[&[&str]] = &[&[
    "crates/idem-core/src/engine/answer.rs",
    "crates/idem-core/src/engine/context.rs",
    "crates/idem-core/src/engine/contract.rs",
    "crates/idem-core/src/engine/hold.rs",
    "crates/idem-core/src/engine/late_acquires.rs",
    "crates/idem-core/src/engine/mod.rs",
    "crates/idem-core/src/engine/observer.rs",
    "crates/idem-core/src/engine/probe.rs",
    "crates/idem-core/src/engine/renewal.rs",
    "crates/idem-core/src/engine/settings.rs",
    "crates/idem-core/src/engine/settle.rs",
]];
