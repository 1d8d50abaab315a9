//! NCCL times measured with nccl-tests on hosts of several owners.
//!
//! The simulator knows the hosts from their descriptions in `clusters/` and NCCL from its source.
//! The NVLink efficiencies of `dgx-a100` and `dgx1-v100` are those of the largest vectors of
//! `validation/nccl_all_reduce.csv`.

use paceline_sim::table::collectives::rows;

/// Errors of all rows of a table, in ascending order.
fn errors(table: &str) -> Vec<f64> {
    let rows = rows(table, "table").unwrap();
    let error = |row: &paceline_sim::table::collectives::Row| {
        let predicted = row.simulate().unwrap().predicted_s;
        (predicted / row.measured_s().unwrap() - 1.0).abs()
    };
    let mut errors: Vec<f64> = rows.iter().map(error).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

fn assert_within(table: &str, median: f64, most: f64) {
    let errors = errors(table);
    let (middle, last) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    assert!(middle <= median, "median {:.1} %", 100.0 * middle);
    assert!(last <= most, "worst {:.1} %", 100.0 * last);
}

/// VIA-Research/vTrain, `trace/a100` and `trace/v100`: one DGX A100 and one DGX-1.
const VTRAIN: &str = "\
gpu,gpus,op,size_bytes,time_us_out_of_place,time_us_in_place
A100,2,all_reduce,16777216,131.9,129.4
A100,2,all_reduce,1073741824,5442.8,5453.4
A100,3,all_reduce,33554432,266.5,263.9
A100,4,all_reduce,1048576,51.4,52.74
A100,4,all_reduce,268435456,1929.0,1927.7
A100,5,all_reduce,8388608,123.8,120.2
A100,6,all_reduce,4194304,82.55,80.11
A100,7,all_reduce,134217728,1147.4,1145.3
A100,8,all_reduce,16777216,232.4,231.0
A100,8,all_reduce,1073741824,8193.0,8196.4
V100,2,all_reduce,2097152,116.0,114.5
V100,3,all_reduce,16777216,518.2,518.299
V100,4,all_reduce,134217728,2364.8,2360.0
V100,5,all_reduce,67108864,2953.3,2948.9
V100,6,all_reduce,8388608,333.3,333.5
V100,7,all_reduce,4194304,157.8,158.6
V100,8,all_reduce,2097152,101.3,101.0
V100,8,all_reduce,536870912,7004.4,7012.2
";

#[test]
fn one_host_comes_out_within_a_tenth() {
    assert_within(VTRAIN, 0.10, 0.15);
}

/// microsoft/superbenchmark, `tests/benchmarks/micro_benchmarks/test_cuda_nccl_bw_performance.py`:
/// another host with eight A100s, and other operations.
const SUPERBENCH: &str = "\
gpu,gpus,op,size_bytes,time_us_out_of_place
A100,8,all_reduce,2097152,93.48
A100,8,all_reduce,8388608,162.0
A100,8,all_reduce,67108864,584.5
A100,8,all_reduce,536870912,4200.3
A100,8,all_reduce,8589934592,63896
A100,8,reduce_scatter,67108864,356.1
A100,8,reduce_scatter,1073741824,4203.0
A100,8,broadcast,67108864,374.8
A100,8,broadcast,1073741824,4769.2
A100,8,reduce,268435456,1251.4
A100,8,all_to_all,134217728,633.6
A100,8,all_to_all,1073741824,4335.5
";

#[test]
fn another_host_and_other_operations_come_out_within_a_tenth() {
    assert_within(SUPERBENCH, 0.10, 0.20);
}

/// NVIDIA/deepops, Slurm cluster guide: four DGX A100s with eight NICs each.
const DEEPOPS: &str = "\
gpu,gpus,op,size_bytes,time_us_out_of_place
A100,32,all_reduce,1048576,135.3
A100,32,all_reduce,4194304,228.7
A100,32,all_reduce,16777216,381.0
A100,32,all_reduce,67108864,1079.5
A100,32,all_reduce,268435456,3083.1
A100,32,all_reduce,1073741824,11643
A100,32,all_reduce,4294967296,43557
";

#[test]
fn four_hosts_come_out_within_a_tenth() {
    assert_within(DEEPOPS, 0.10, 0.25);
}
