#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    training::fuzz_tensor_header(data);
    fsdp::fuzz_tensor_file(data);
    tensor_parallel::fuzz_tensor_file(data);
});
