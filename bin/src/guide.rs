//! The Rust code blocks of the README and the guide, compiled as doc tests: one struct per file.

macro_rules! chapters {
    ($($name:ident: $file:literal,)*) => {
        $(#[doc = include_str!(concat!("../../", $file))] struct $name;)*
    };
}

chapters! {
    Readme: "README.md",
    Introduction: "book/src/introduction.md",
    GettingStarted: "book/src/getting-started.md",
    OwnModel: "book/src/own-model.md",
    FromPytorch: "book/src/from-pytorch.md",
    Models: "book/src/models.md",
    Language: "book/src/language.md",
    Preferences: "book/src/preferences.md",
    FineTuning: "book/src/fine-tuning.md",
    AnyLayout: "book/src/any-layout.md",
    Experiments: "book/src/experiments.md",
    Layout: "book/src/layout.md",
    DataParallelism: "book/src/ddp.md",
    Sharding: "book/src/fsdp.md",
    TensorParallelism: "book/src/tensor-parallel.md",
    ContextParallelism: "book/src/context-parallel.md",
    GroupsFarApart: "book/src/far.md",
    Pipelines: "book/src/pipeline.md",
    Data: "book/src/data.md",
    Checkpoints: "book/src/checkpoints.md",
    Watching: "book/src/watching.md",
    Elasticity: "book/src/elasticity.md",
    Launching: "book/src/launching.md",
    Cuda: "book/src/cuda.md",
    Performance: "book/src/performance.md",
    Troubleshooting: "book/src/troubleshooting.md",
    Environment: "book/src/environment.md",
    Security: "book/src/security.md",
    Internals: "book/src/internals.md",
}
