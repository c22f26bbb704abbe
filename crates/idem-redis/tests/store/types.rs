//! What Redis cannot promise does not compile.

#[test]
fn contracts_that_redis_cannot_keep_do_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
