#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| idem_fuzz_oracles::try_input("same_reading", input));
