//! Fuzzes the header of a tensor file.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| training::fuzz_tensor_file(data));
