#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| launch::fuzz::council(data));
