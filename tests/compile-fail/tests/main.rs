//! No file in the folders next to this one may compile; the `.stderr` file next to each holds the compiler's message.
//!
//! The expected messages are those of the toolchain that the workspace names as its `rust-version`.

#[test]
fn what_cannot_be_promised_does_not_compile() {
    let cases = trybuild::TestCases::new();
    for folder in ["actix", "axum", "redis"] {
        cases.compile_fail(format!("tests/{folder}/*.rs"));
    }
}
