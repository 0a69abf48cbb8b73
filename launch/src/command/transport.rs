//! Options for the transport between ranks and its encryption, shared by experiments and benchmarks.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use comm::{TcpConfig, Tls, Transport};

/// `--transport` and `--tls`, to be flattened into a command's options.
///
/// ```
/// use clap::Parser;
/// use comm::{TcpConfig, Transport};
/// use launch::command::TransportOption;
///
/// #[derive(Parser)]
/// struct Options {
///     #[command(flatten)]
///     transport: TransportOption,
/// }
///
/// let options = Options::parse_from(["bench", "--transport", "shm"]);
/// let mut config = TcpConfig::default();
/// options.transport.apply(&mut config);
/// assert_eq!(config.transport, Transport::Shm);
/// ```
#[derive(Debug, Clone, Default, Args)]
pub struct TransportOption {
    /// Channel between ranks of one host [default: GIRANDOLE_TRANSPORT, else the backend's]
    #[arg(long, value_name = "KIND", value_parser = transport(), help_heading = "Ranks")]
    pub transport: Option<Transport>,
    /// TCP connections to encrypt, with keys derived from the job's secret [default: GIRANDOLE_TLS, else off]
    #[arg(long, value_name = "WHICH", value_parser = tls(), help_heading = "Ranks")]
    pub tls: Option<Tls>,
}

impl TransportOption {
    /// Overrides the environment's settings with the options that were given.
    pub fn apply(&self, config: &mut TcpConfig) {
        config.transport = self.transport.unwrap_or(config.transport);
        config.tls = self.tls.unwrap_or(config.tls);
    }
}

fn transport() -> impl TypedValueParser<Value = Transport> {
    let values = [
        ("auto", "Shared memory between ranks that can share it, TCP between all others"),
        ("tcp", "TCP between all ranks"),
        ("shm", "Shared memory between all ranks; an error where that is impossible"),
    ];
    PossibleValuesParser::new(values.map(|(name, help)| PossibleValue::new(name).help(help)))
        .try_map(|name| name.parse::<Transport>())
}

fn tls() -> impl TypedValueParser<Value = Tls> {
    let values = [
        ("off", "None: anyone who can listen to the network sees the model"),
        ("hosts", "Connections between hosts"),
        ("all", "All connections, also within a host"),
    ];
    PossibleValuesParser::new(values.map(|(name, help)| PossibleValue::new(name).help(help)))
        .try_map(|name| name.parse::<Tls>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Options {
        #[command(flatten)]
        transport: TransportOption,
    }

    #[test]
    fn the_option_wins_over_the_environment() {
        let mut config = TcpConfig { transport: Transport::Shm, ..TcpConfig::default() };
        Options::parse_from(["x"]).transport.apply(&mut config);
        assert_eq!(config.transport, Transport::Shm);
        for transport in [Transport::Auto, Transport::Tcp, Transport::Shm] {
            let options = Options::parse_from(["x", "--transport", &transport.to_string()]);
            options.transport.apply(&mut config);
            assert_eq!(config.transport, transport);
        }
        for tls in [Tls::Off, Tls::Hosts, Tls::All] {
            Options::parse_from(["x", "--tls", &tls.to_string()]).transport.apply(&mut config);
            assert_eq!(config.tls, tls);
        }
        let message = Options::try_parse_from(["x", "--transport", "rdma"]).unwrap_err().to_string();
        assert!(message.contains("'rdma'") && message.contains("auto, tcp, shm"), "{message}");
    }
}
