//! The store keeps the contract on both emulators.

use idem_testkit::Subject;

use crate::support::{Emulator, subject};

async fn moto() -> Subject {
    subject(Emulator::Moto).await
}

async fn dynoxide() -> Subject {
    subject(Emulator::Dynoxide).await
}

idem_testkit::conformance!(on_moto, moto);
idem_testkit::conformance!(on_dynoxide, dynoxide);

idem_testkit::resolve_conformance!(resolving_on_moto, moto);
idem_testkit::resolve_conformance!(resolving_on_dynoxide, dynoxide);

idem_testkit::inspect_conformance!(inspecting_on_moto, moto);
idem_testkit::inspect_conformance!(inspecting_on_dynoxide, dynoxide);

/// Each verb is a round trip or more.
const CASES: u32 = 100;

idem_testkit::state_machine!(the_store_follows_the_model_on_moto, moto, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_on_dynoxide, dynoxide, CASES);
