//! The same pieces of work as callgrind counts, in nanoseconds: `cargo xtask bench --micro`.

#[path = "../src/document.rs"]
mod document;
#[path = "../src/work.rs"]
mod work;

use crate::work::{ALL, Fixture};

fn main() {
    divan::main();
}

#[divan::bench(args = ALL.map(|(name, _)| name))]
fn core(bencher: divan::Bencher<'_, '_>, name: &str) {
    let fixture = Fixture::new().unwrap_or_else(|error| panic!("the fixture could not be made: {error}"));
    let Some((_, work)) = ALL.into_iter().find(|(known, _)| *known == name) else { return };
    bencher.bench_local(|| work(&fixture));
}
