//! Each file in the folders beside this one must not compile, and the compiler says what stands beside it.
//!
//! The expected messages are those of the toolchain that the workspace names as its `rust-version`.

#[test]
fn what_cannot_be_promised_does_not_compile() {
    let cases = trybuild::TestCases::new();
    for folder in ["actix", "axum", "redis"] {
        cases.compile_fail(format!("tests/{folder}/*.rs"));
    }
}
