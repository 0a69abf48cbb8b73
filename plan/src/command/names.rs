//! Values of the options of `plan` that are names.

use clap::ValueEnum;

use crate::forecast::Network;

/// The model of an experiment, by the command that trains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Linear(1, 1)
    DdpLinear,
    /// Linear(20, 1)
    DdpTrainer,
    /// Linear 10-20-2
    DdpMlp,
    /// Linear 1024-4096-4096-1024-10
    FsdpMlp,
    /// Linear 1024-4096-1024
    TensorParallelMlp,
    /// The Transformer of the DDP tutorial
    DdpTransformer,
    /// The language model of the PyTorch handbook's layers
    TensorParallelTransformer,
}

/// Network between ranks, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NetworkName {
    /// NVLink in nodes of 8 ranks, InfiniBand of 400 Gbit/s a rank between them
    Nvlink,
    /// InfiniBand of 400 Gbit/s a rank
    Infiniband,
    /// Ethernet of 25 Gbit/s a rank
    #[value(name = "ethernet-25g")]
    Ethernet25g,
}

impl NetworkName {
    /// Returns the network.
    pub fn network(self) -> Network {
        match self {
            Self::Nvlink => Network::nvlink(),
            Self::Infiniband => Network::infiniband(),
            Self::Ethernet25g => Network::ethernet_25g(),
        }
    }
}
