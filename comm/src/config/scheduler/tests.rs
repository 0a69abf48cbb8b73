//! Tests of the ranks and addresses that are found in the variables of each scheduler and launcher.

use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;
use crate::TcpConfig;

fn lookup<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
    |name| variables.iter().rev().find(|(other, _)| *other == name).map(|(_, value)| value.into())
}

fn found(variables: &[(&str, &str)]) -> Result<Option<SchedulerInfo>> {
    detect(&Variables(&lookup(variables)))
}

fn place(variables: &[(&str, &str)]) -> LaunchedRank {
    LaunchedRank::from_lookup(&lookup(variables)).unwrap().unwrap()
}

fn master(variables: &[(&str, &str)]) -> Result<(String, u16)> {
    found(variables).unwrap().unwrap().master(&Variables(&lookup(variables)))
}

fn at(rank: usize, world_size: usize, local: [Option<usize>; 3]) -> LaunchedRank {
    let [local_rank, local_world_size, node_rank] = local;
    LaunchedRank { rank, world_size, local_rank, local_world_size, node_rank }
}

const SLURM: [(&str, &str); 8] = [
    ("SLURM_JOB_ID", "17"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "5"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_JOB_NODELIST", "n[02-03],m7"),
    ("SLURM_TASKS_PER_NODE", "2(x2),1"),
];

const OPEN_MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_NAMESPACE", "822280193"),
];

const PMI: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];

const KUBEFLOW: [(&str, &str); 6] = [
    ("PET_NNODES", "3"),
    ("PET_NPROC_PER_NODE", "1"),
    ("PET_NODE_RANK", "2"),
    ("PET_MASTER_ADDR", "job-master-0"),
    ("PET_MASTER_PORT", "23456"),
    ("RANK", "2"),
];

#[test]
fn nobody_tells_anything() {
    assert_eq!(LaunchedRank::from_lookup(&lookup(&[])).unwrap(), None);
    assert_eq!(
        LaunchedRank::from_lookup(&lookup(&[("SLURM_JOB_ID", "3"), ("SLURM_NTASKS", "4")])).unwrap(),
        None
    );
}

#[test]
fn each_tells_its_place() {
    assert_eq!(place(&SLURM), at(3, 5, [Some(1), Some(2), Some(1)]));
    assert_eq!(place(&OPEN_MPI), at(1, 4, [Some(1), Some(4), None]));
    assert_eq!(place(&PMI), at(1, 2, [Some(1), Some(2), None]));
    assert_eq!(place(&KUBEFLOW), at(2, 3, [Some(0), Some(1), Some(2)]));
    let torchrun = [
        ("RANK", "5"),
        ("WORLD_SIZE", "6"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_RANK", "2"),
    ];
    assert_eq!(place(&torchrun), at(5, 6, [Some(1), Some(2), Some(2)]));
}

#[test]
fn the_innermost_counts() {
    let torchrun = [("RANK", "5"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", "1")];
    for outer in [&SLURM[..], &OPEN_MPI, &PMI, &KUBEFLOW] {
        assert_eq!(place(&[outer, &torchrun].concat()).world_size, 6);
    }
    assert_eq!(place(&[&SLURM[..], &OPEN_MPI].concat()).world_size, 4);
    assert_eq!(place(&[&SLURM[..], &PMI].concat()).world_size, 2);
    // srun --mpi=pmi2 and --mpi=pmix set both kinds of variables, for the same ranks.
    let pmi2 = [("PMI_RANK", "3"), ("PMI_SIZE", "5"), ("PMI_JOBID", "17.0")];
    assert_eq!(place(&[&SLURM[..], &pmi2].concat()), place(&SLURM));
    let pmix = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "5")];
    assert_eq!(place(&[&SLURM[..], &pmix].concat()).local_rank, Some(1));
}

#[test]
fn where_rank_0_is() {
    assert_eq!(master(&SLURM).unwrap().0, "n02");
    let local = [("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")];
    assert_eq!(master(&[&SLURM[..], &local].concat()).unwrap().0, "127.0.0.1");
    let step = [("SLURM_STEP_NODELIST", "m7"), ("SLURM_STEP_NUM_TASKS", "4")];
    assert_eq!(master(&[&SLURM[..], &step].concat()).unwrap().0, "m7");
    assert_eq!(master(&OPEN_MPI).unwrap().0, "127.0.0.1");
    assert_eq!(master(&KUBEFLOW).unwrap(), ("job-master-0".into(), 23456));
    let given = [("MASTER_ADDR", "10.0.0.9"), ("MASTER_PORT", "1234")];
    for all in [&SLURM[..], &OPEN_MPI, &PMI] {
        assert_eq!(master(&[all, &given].concat()).unwrap(), ("10.0.0.9".into(), 1234));
    }
    let apart = [&OPEN_MPI[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]].concat();
    let message = master(&apart).unwrap_err().to_string();
    assert!(message.starts_with("MASTER_ADDR: got nothing; mpirun does not tell"), "{message}");
    // Of several hosts, MPICH's mpiexec names neither rank 0's nor the job.
    let apart = [&PMI[..], &[("MPI_LOCALNRANKS", "1"), ("MASTER_ADDR", "10.0.0.9")]].concat();
    let message = master(&apart).unwrap_err().to_string();
    assert!(message.starts_with("MASTER_PORT: got nothing; the launcher does not name the job"), "{message}");
    assert!(master(&[&apart[..], &[("GIRANDOLE_JOB_ID", "night")]].concat()).is_ok());
    assert_eq!(master(&[&apart[..], &given].concat()).unwrap(), ("10.0.0.9".into(), 1234));
}

#[test]
fn all_ranks_of_a_step_find_one_port_and_other_steps_another() {
    let of = |variables: &[(&str, &str)]| master(&[&SLURM[..], variables].concat()).unwrap().1;
    assert_eq!(of(&[]), of(&[("SLURM_PROCID", "4"), ("SLURM_NODEID", "2"), ("SLURM_LOCALID", "0")]));
    assert_ne!(of(&[]), of(&[("SLURM_STEP_ID", "1")]));
    assert_ne!(of(&[]), of(&[("SLURM_JOB_ID", "18")]));
    assert!((10_000..30_000).contains(&of(&[])));
}

#[test]
fn a_batch_script_and_a_shell_are_no_ranks() {
    let script: Vec<_> = SLURM.into_iter().filter(|(name, _)| *name != "SLURM_STEP_ID").collect();
    assert!(found(&[&script[..], &[("ENVIRONMENT", "BATCH")]].concat()).unwrap().is_none());
    assert!(found(&[&SLURM[..], &[("ENVIRONMENT", "BATCH")]].concat()).unwrap().is_some());
    let alone = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_ID", "0")];
    assert!(found(&alone).unwrap().is_some());
    assert!(found(&[&alone[..], &[("SLURM_PTY_PORT", "33")]].concat()).unwrap().is_none());
    // A job of several tasks whose shell is a step of one.
    let step = [("SLURM_JOB_NAME", "interactive"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")];
    assert!(found(&[&SLURM[..], &step].concat()).unwrap().is_none());
}

#[test]
fn in_a_shell_of_several_tasks_nobody_waits_for_the_others() {
    for shell in ["bash", "interactive"] {
        let variables = [&SLURM[..], &[("SLURM_PTY_PORT", "33"), ("SLURM_JOB_NAME", shell)]].concat();
        let message = found(&variables).unwrap_err().to_string();
        let told =
            format!("SLURM_PTY_PORT=33 and SLURM_JOB_NAME={shell} says that it is an interactive shell");
        assert!(message.starts_with("SLURM_PROCID: got ") && message.contains(&told), "{message}");
        assert!(message.contains("put srun before the command"), "{message}");
        // The step's own program.
        let own = std::process::id().to_string();
        assert!(found(&[&variables[..], &[("SLURM_TASK_PID", &own)]].concat()).unwrap().is_some());
    }
    // srun --pty PROGRAM starts all tasks.
    let program = [("SLURM_PTY_PORT", "33"), ("SLURM_JOB_NAME", "girandole")];
    assert!(found(&[&SLURM[..], &program].concat()).unwrap().is_some());
}

#[test]
fn a_wrong_value_names_its_variable() {
    for (variables, name, value) in [
        (&SLURM[..], "SLURM_PROCID", "5"),
        (&SLURM, "SLURM_PROCID", "x"),
        (&SLURM, "SLURM_NTASKS", "0"),
        (&SLURM, "SLURM_NTASKS", "many"),
        (&SLURM, "SLURM_LOCALID", "2"),
        (&SLURM, "SLURM_LOCALID", "-1"),
        (&SLURM, "SLURM_JOB_NODELIST", "n[0-"),
        (&SLURM, "SLURM_TASKS_PER_NODE", "2(x"),
        (&SLURM, "SLURM_LAUNCH_NODE_IPADDR", "here"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_RANK", "4"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "four"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "x"),
        (&PMI, "PMI_RANK", "2"),
        (&PMI, "PMI_SIZE", "0"),
        (&KUBEFLOW, "PET_NODE_RANK", "3"),
        (&KUBEFLOW, "PET_NNODES", "two"),
        (&KUBEFLOW, "PET_NPROC_PER_NODE", "4"),
        (&KUBEFLOW, "PET_NPROC_PER_NODE", "auto"),
    ] {
        let message = found(&[variables, &[(name, value)]].concat()).unwrap_err().to_string();
        assert!(message.starts_with(&format!("{name}: got {value}; ")), "{message}");
        assert_eq!(message.lines().count(), 1);
    }
    let alone = found(&[("PET_NNODES", "two")]).unwrap_err().to_string();
    assert!(alone.starts_with("PET_NNODES: got two; "), "{alone}");
    for (variables, missing) in
        [(&SLURM[..], "SLURM_NTASKS"), (&OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (&PMI, "PMI_SIZE")]
    {
        let rest: Vec<_> = variables.iter().copied().filter(|(name, _)| *name != missing).collect();
        let message = found(&rest).unwrap_err().to_string();
        assert!(message.starts_with(&format!("{missing}: got nothing; ")), "{message}");
    }
    for (name, value) in [("MASTER_ADDR", "not a host"), ("MASTER_PORT", "0"), ("MASTER_PORT", "99999")] {
        let message = master(&[&SLURM[..], &[(name, value)]].concat()).unwrap_err().to_string();
        assert!(message.starts_with(&format!("{name}: got {value}; ")), "{message}");
    }
}

/// The host name of rank 0 does not resolve.
#[test]
fn who_gives_a_timeout_waits_no_longer_for_the_host_of_rank_0() {
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(300);
    let given = [("MASTER_ADDR", "nowhere.invalid"), ("MASTER_PORT", "1234")];
    let unset = [("GIRANDOLE_TIMEOUT", "")];
    let own = [("GIRANDOLE_TIMEOUT", "3000")];
    for scheduler in [&SLURM[..], &OPEN_MPI, &PMI, &KUBEFLOW] {
        for environment in [&unset, &own] {
            let variables = [scheduler, &given, environment].concat();
            let (end, ended) = channel();
            std::thread::spawn(move || {
                let config = TcpConfig::from_lookup(&lookup(&variables), Some(SHORT));
                end.send(config).unwrap();
            });
            let message = ended.recv_timeout(LONG).unwrap().unwrap_err().to_string();
            let told = "the host of rank 0: got nowhere.invalid; the name has no address (";
            assert!(message.starts_with(told), "{message}");
        }
    }
    // Under a launcher the name is resolved only when the ranks meet.
    let torchrun = [&[("RANK", "1"), ("WORLD_SIZE", "2")][..], &given, &own].concat();
    assert_eq!(TcpConfig::from_lookup(&lookup(&torchrun), Some(SHORT)).unwrap().timeout, SHORT);
}
