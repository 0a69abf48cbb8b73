//! Configuration from the environment: what is accepted, and how mistakes are named.

use super::*;

fn read(variables: &[(&str, &str)]) -> Result<TcpConfig> {
    read_within(variables, None)
}

fn read_within(variables: &[(&str, &str)], timeout: Option<Duration>) -> Result<TcpConfig> {
    let value = |name: &str| variables.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.into());
    TcpConfig::from_lookup(&value, timeout)
}

const GOOD: [(&str, &str); 4] =
    [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

#[test]
fn a_launchers_environment_is_enough() {
    let config = read(&GOOD).unwrap();
    assert_eq!((config.rank, config.world_size, config.init_method), (1, 4, InitMethod::Env));
    assert_eq!((config.bind.to_string().as_str(), config.timeout.as_secs()), ("127.0.0.1", 300));
    assert!(config.secret.is_none() && config.job_id.is_empty());
    assert_eq!(config.transport, Transport::Auto);
    assert!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).is_ok(), "one rank meets nobody");
}

#[test]
fn every_variable_counts() {
    let digits = "ab".repeat(32);
    let more = [
        ("GIRANDOLE_SECRET", digits.as_str()),
        ("GIRANDOLE_JOB_ID", "night run"),
        ("GIRANDOLE_INIT_METHOD", "file:///tmp/meet"),
        ("GIRANDOLE_BIND", "::1"),
        ("GIRANDOLE_TIMEOUT", "2.5"),
        ("GIRANDOLE_TRANSPORT", "shm"),
        ("GIRANDOLE_TLS", "hosts"),
    ];
    let config = read(&[&GOOD[..2], &more].concat()).unwrap();
    assert_eq!((config.secret.unwrap().to_hex(), config.transport), (digits.clone(), Transport::Shm));
    assert_eq!(
        (config.job_id.as_str(), config.init_method.to_string().as_str()),
        ("night run", "file:///tmp/meet")
    );
    assert_eq!((config.bind.to_string().as_str(), config.timeout), ("::1", Duration::from_millis(2500)));
    assert_eq!(config.tls, Tls::Hosts);
    let message = read(&[&GOOD[..], &[("GIRANDOLE_TLS", "all")]].concat()).unwrap_err().to_string();
    assert!(message.starts_with("TLS (GIRANDOLE_TLS): got all; its keys come from"), "{message}");
}

#[test]
fn ipv6_addresses_may_be_in_brackets() {
    let more = [("MASTER_ADDR", "[::1]"), ("GIRANDOLE_BIND", "[::1]")];
    let all = [&GOOD[..2], &GOOD[3..], &more].concat();
    assert_eq!(read(&all).unwrap().bind.to_string(), "::1");
    let lookup = |name: &str| all.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).into());
    assert_eq!(Variables(&lookup).master().unwrap(), ("::1".to_string(), 29500));
}

#[test]
fn a_missing_variable_is_named() {
    for (name, _) in GOOD {
        let rest: Vec<_> = GOOD.into_iter().filter(|(other, _)| *other != name).collect();
        let message = read(&rest).unwrap_err().to_string();
        assert!(message.starts_with(&format!("{name}: got nothing; set it to ")), "{message}");
    }
}

#[test]
fn a_wrong_variable_is_named_with_its_value() {
    for (name, value) in [
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "4.0"),
        ("MASTER_ADDR", "not a host"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "+80"),
        ("MASTER_PORT", "99999"),
        ("GIRANDOLE_BIND", "localhost"),
        ("GIRANDOLE_BIND", "224.0.0.1"),
        ("GIRANDOLE_BIND", "255.255.255.255"),
        ("GIRANDOLE_BIND", "ff02::1"),
        ("GIRANDOLE_BIND", "fe80::1"),
        ("GIRANDOLE_TIMEOUT", "soon"),
        ("GIRANDOLE_TIMEOUT", "-1"),
        ("GIRANDOLE_TIMEOUT", "NaN"),
        ("GIRANDOLE_TIMEOUT", "inf"),
        ("GIRANDOLE_TRANSPORT", "rdma"),
        ("GIRANDOLE_TLS", "on"),
        ("GIRANDOLE_INIT_METHOD", "etcd://x"),
        ("GIRANDOLE_SECRET_FILE", "/nowhere"),
    ] {
        let message = read(&[&GOOD[..], &[(name, value)]].concat()).unwrap_err().to_string();
        assert!(message.starts_with(name) && message.contains(value), "{message}");
        assert_eq!(message.lines().count(), 1);
    }
}

#[test]
fn a_secret_is_not_repeated_and_given_once() {
    let message = read(&[&GOOD[..], &[("GIRANDOLE_SECRET", "hunter2")]].concat()).unwrap_err().to_string();
    assert!(message.starts_with("GIRANDOLE_SECRET") && !message.contains("hunter2"), "{message}");
    let both = [("GIRANDOLE_SECRET", "hunter2"), ("GIRANDOLE_SECRET_FILE", "/x")];
    let message = read(&[&GOOD[..], &both].concat()).unwrap_err().to_string();
    assert!(message.contains("unset one") && !message.contains("hunter2"), "{message}");
}

#[test]
fn ranks_and_sizes_that_cannot_be_are_refused() {
    for (rank, world_size) in [("0", "0"), ("4", "4"), ("5", "4"), ("0", "1000000000")] {
        let message = read(&[&GOOD[..], &[("RANK", rank), ("WORLD_SIZE", world_size)]].concat())
            .unwrap_err()
            .to_string();
        assert!(message.contains("give 0 to 3") || message.contains("give 1 to 1048576 ranks"), "{message}");
        let variable = if message.contains("give 0 to 3") { "RANK: got " } else { "WORLD_SIZE: got " };
        assert!(message.starts_with(variable), "{message}");
    }
    let elastic =
        |world_size| TcpConfig { world_size, elastic: Some(Default::default()), ..TcpConfig::default() };
    assert!(elastic(10_000).validate().is_ok());
    let message = elastic(10_001).validate().unwrap_err().to_string();
    assert!(
        message.ends_with("a group that changes (GIRANDOLE_ELASTIC) has at most 10000 ranks"),
        "{message}"
    );
    let config = TcpConfig { timeout: Duration::ZERO, ..TcpConfig::default() };
    assert!(config.validate().is_err());
    let config = TcpConfig { timeout: Duration::MAX, ..TcpConfig::default() };
    assert!(config.validate().is_ok() && config.bounded_timeout() < Duration::MAX);
}
