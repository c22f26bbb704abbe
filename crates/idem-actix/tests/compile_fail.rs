//! Layers that must not compile, and what the compiler says to whoever writes one.
//!
//! The expected messages are those of the toolchain that the workspace names as its `rust-version`.

#[test]
fn layers_without_a_promise_do_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
