//! What carries data between ranks: an option of experiments and benches alike.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use comm::{TcpConfig, Transport};

/// `--transport`, to be flattened into a command's options.
///
/// ```
/// use clap::Parser;
/// use comm::{TcpConfig, Transport};
/// use girandole::options::TransportOption;
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
    /// What carries data between ranks of one host [default: what GIRANDOLE_TRANSPORT says, else the back end's]
    #[arg(long, value_name = "KIND", value_parser = transport(), help_heading = "Ranks")]
    pub transport: Option<Transport>,
}

impl TransportOption {
    /// Writes the option, where it was given, over what the environment says.
    pub fn apply(&self, config: &mut TcpConfig) {
        config.transport = self.transport.unwrap_or(config.transport);
    }
}

fn transport() -> impl TypedValueParser<Value = Transport> {
    let values = [
        ("auto", "Shared memory between ranks that have some, TCP between all others"),
        ("tcp", "TCP between all ranks"),
        ("shm", "Shared memory between all ranks; an error where that cannot be"),
    ];
    PossibleValuesParser::new(values.map(|(name, help)| PossibleValue::new(name).help(help)))
        .try_map(|name| name.parse::<Transport>())
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
        let message = Options::try_parse_from(["x", "--transport", "rdma"]).unwrap_err().to_string();
        assert!(message.contains("'rdma'") && message.contains("auto, tcp, shm"), "{message}");
    }
}
