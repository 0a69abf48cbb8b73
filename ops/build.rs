//! Compiles the kernels for CUDA to PTX, with nvcc.

#[cfg(feature = "cuda")]
fn main() -> cudaforge::Result<()> {
    println!("cargo::rerun-if-changed=src/cuda/kernels.cu");
    let kernels = cudaforge::KernelBuilder::new().source_files(vec!["src/cuda/kernels.cu"]);
    kernels.arg("-std=c++17").arg("-O3").build_ptx().map(drop)
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
