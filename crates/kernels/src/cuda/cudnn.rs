//! Operation graphs of cuDNN's backend: descriptors, tensors and execution plans.

use super::device::{CudaError, failed};
use super::element_type::ElementType;
use cudarc::cudnn::{result, sys};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendAttributeType_t as Kind;
use sys::cudnnBackendDescriptorType_t as Type;

/// cuDNN on one stream.
pub struct Cudnn {
    handle: sys::cudnnHandle_t,
}

// SAFETY: a handle may move between threads; it is used from one at a time.
unsafe impl Send for Cudnn {}

impl Cudnn {
    /// Opens cuDNN for a stream; `None` if the library is absent.
    pub fn open(stream: &Arc<CudaStream>) -> Result<Option<Self>, CudaError> {
        // SAFETY: loading the library runs its initialisers, which have no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let handle = result::create_handle().map_err(failed("starting cuDNN"))?;
        // SAFETY: both handles are alive, and the caller keeps the stream.
        unsafe { result::set_stream(handle, stream.cu_stream().cast()) }
            .map_err(failed("giving cuDNN its stream"))?;
        Ok(Some(Self { handle }))
    }

    /// Version of the library, such as 91900.
    pub fn version() -> usize {
        result::get_version()
    }

    /// Queues a plan with the addresses of its tensors, by their ids.
    ///
    /// # Safety
    ///
    /// The addresses are valid for the plan's tensors, and `workspace` for as many bytes as the plan
    /// asks, until the stream has passed the call. By-value tensors are host addresses.
    pub(super) unsafe fn run(
        &self,
        plan: &Plan,
        tensors: &[(i64, CUdeviceptr)],
        workspace: CUdeviceptr,
    ) -> Result<(), CudaError> {
        let ids: Vec<i64> = tensors.iter().map(|(id, _)| *id).chain(plan.values.ids()).collect();
        let mut at: Vec<*mut c_void> = tensors.iter().map(|(_, at)| *at as *mut c_void).collect();
        at.extend(plan.values.addresses());
        let pack = Descriptor::new(Type::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, &ids)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR, &at)?;
        let workspace = [workspace as *mut c_void];
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Kind::CUDNN_TYPE_VOID_PTR, &workspace)?;
        pack.finalize()?;
        // SAFETY: plan and pack are finalized, and the caller promises the addresses.
        unsafe { sys::cudnnBackendExecute(self.handle, plan.plan.raw, pack.raw) }
            .result()
            .map_err(failed(plan.name))
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        // SAFETY: created in `open`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Descriptor of the backend.
struct Descriptor {
    raw: sys::cudnnBackendDescriptor_t,
}

impl Descriptor {
    fn new(kind: Type) -> Result<Self, CudaError> {
        let mut raw = null_mut();
        // SAFETY: `raw` is written before it is read.
        unsafe { sys::cudnnBackendCreateDescriptor(kind, &raw mut raw) }
            .result()
            .map_err(failed("creating a cuDNN descriptor"))?;
        Ok(Self { raw })
    }

    fn set<V>(&self, name: Name, kind: Kind, values: &[V]) -> Result<(), CudaError> {
        // SAFETY: the slice has as many values as are announced, of the kind's size.
        unsafe {
            sys::cudnnBackendSetAttribute(
                self.raw,
                name,
                kind,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        }
        .result()
        .map_err(|error| failed(&format!("setting {name:?}"))(error))
    }

    fn link(&self, name: Name, to: &[&Self]) -> Result<(), CudaError> {
        let raw: Vec<_> = to.iter().map(|descriptor| descriptor.raw).collect();
        self.set(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw)
    }

    fn finalize(&self) -> Result<(), CudaError> {
        // SAFETY: the descriptor is alive.
        unsafe { sys::cudnnBackendFinalize(self.raw) }
            .result()
            .map_err(failed("finalizing a cuDNN descriptor"))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}

/// Scalars of a graph: cuDNN reads them from host memory at every call.
#[derive(Default)]
struct Values {
    all: Vec<(i64, Box<f32>)>,
}

impl Values {
    fn ids(&self) -> impl Iterator<Item = i64> {
        self.all.iter().map(|(id, _)| *id)
    }

    fn addresses(&self) -> impl Iterator<Item = *mut c_void> {
        self.all.iter().map(|(_, value)| (&raw const **value).cast_mut().cast())
    }
}

/// Executable graph.
pub(super) struct Plan {
    plan: Descriptor,
    values: Values,
    name: &'static str,
    /// Bytes of workspace that a call needs.
    pub(super) workspace: u64,
}

// SAFETY: the descriptors and values belong to the plan, and cuDNN only reads them in a call.
unsafe impl Send for Plan {}

/// Tensor of a graph.
#[derive(Clone, Copy)]
pub(super) struct Tensor(usize);

/// Data type of a tensor or a computation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    Element(ElementType),
    Int32,
    Boolean,
}

pub(super) const FLOAT: Data = Data::Element(ElementType::F32);

impl Data {
    const fn raw(self) -> sys::cudnnDataType_t {
        match self {
            Self::Element(ElementType::F32) => sys::cudnnDataType_t::CUDNN_DATA_FLOAT,
            Self::Element(ElementType::Bf16) => sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16,
            Self::Element(ElementType::F16) => sys::cudnnDataType_t::CUDNN_DATA_HALF,
            Self::Int32 => sys::cudnnDataType_t::CUDNN_DATA_INT32,
            Self::Boolean => sys::cudnnDataType_t::CUDNN_DATA_BOOLEAN,
        }
    }
}

/// Dimensions and strides, in elements.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) dims: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Layout {
    /// Layout without gaps.
    pub(super) const fn packed(dims: [i64; 4]) -> Self {
        let [_, b, c, d] = dims;
        Self { dims, strides: [b * c * d, c * d, d, 1] }
    }

    /// The same elements with the last two dimensions exchanged.
    pub(super) const fn transposed(self) -> Self {
        let ([a, b, c, d], [p, q, r, s]) = (self.dims, self.strides);
        Self { dims: [a, b, d, c], strides: [p, q, s, r] }
    }
}

/// Graph under construction.
pub(super) struct Graph {
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    values: Values,
    /// Descriptors that operations refer to.
    parts: Vec<Descriptor>,
    next: i64,
}

/// First id of tensors that the graph names itself.
const OWN_IDS: i64 = 1000;

impl Graph {
    pub(super) const fn new() -> Self {
        Self {
            tensors: Vec::new(),
            operations: Vec::new(),
            values: Values { all: Vec::new() },
            parts: Vec::new(),
            next: OWN_IDS,
        }
    }

    fn add(
        &mut self,
        id: i64,
        layout: Layout,
        data: Data,
        (is_virtual, by_value): (bool, bool),
    ) -> Result<Tensor, CudaError> {
        let tensor = Descriptor::new(Type::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        let integers = Kind::CUDNN_TYPE_INT64;
        tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, integers, &[id])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[data.raw()])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, integers, &layout.dims)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, integers, &layout.strides)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, integers, &[16i64])?;
        if is_virtual {
            tensor.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Kind::CUDNN_TYPE_BOOLEAN, &[true])?;
        }
        if by_value {
            tensor.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Kind::CUDNN_TYPE_BOOLEAN, &[true])?;
        }
        tensor.finalize()?;
        self.tensors.push(tensor);
        Ok(Tensor(self.tensors.len() - 1))
    }

    /// Tensor in device memory, whose address is given by id at every call.
    pub(super) fn tensor(
        &mut self,
        id: i64,
        layout: Layout,
        data: Data,
    ) -> Result<Tensor, CudaError> {
        self.add(id, layout, data, (false, false))
    }

    /// Intermediate result.
    pub(super) fn inner(&mut self, layout: Layout, data: Data) -> Result<Tensor, CudaError> {
        self.next += 1;
        self.add(self.next, layout, data, (true, false))
    }

    /// Scalar constant.
    pub(super) fn scalar(&mut self, value: f32) -> Result<Tensor, CudaError> {
        self.next += 1;
        self.values.all.push((self.next, Box::new(value)));
        self.add(self.next, Layout::packed([1; 4]), FLOAT, (false, true))
    }

    /// Elementwise operation.
    pub(super) fn pointwise(
        &mut self,
        mode: sys::cudnnPointwiseMode_t,
        compute: Data,
        inputs: &[Tensor],
        output: Tensor,
        axis: Option<i64>,
    ) -> Result<Tensor, CudaError> {
        let how = Descriptor::new(Type::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_POINTWISE_MODE, Kind::CUDNN_TYPE_POINTWISE_MODE, &[mode])?;
        let precision = [compute.raw()];
        how.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Kind::CUDNN_TYPE_DATA_TYPE, &precision)?;
        if let Some(axis) = axis {
            how.set(Name::CUDNN_ATTR_POINTWISE_AXIS, Kind::CUDNN_TYPE_INT64, &[axis])?;
        }
        how.finalize()?;
        let operation = Descriptor::new(Type::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.link(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[&how])?;
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (name, input) in names.into_iter().zip(inputs) {
            operation.link(name, &[&self.tensors[input.0]])?;
        }
        let y = Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC;
        operation.link(y, &[&self.tensors[output.0]])?;
        self.finish(how, operation, output)
    }

    /// Batched matrix product over the last two dimensions.
    pub(super) fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<Tensor, CudaError> {
        let how = Descriptor::new(Type::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[FLOAT.raw()])?;
        how.finalize()?;
        let operation = Descriptor::new(Type::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        operation.link(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&how])?;
        operation.link(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &[&self.tensors[a.0]])?;
        operation.link(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &[&self.tensors[b.0]])?;
        operation.link(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &[&self.tensors[c.0]])?;
        self.finish(how, operation, c)
    }

    /// Reduction of the dimensions in which `y` has one element.
    pub(super) fn reduce(
        &mut self,
        operator: sys::cudnnReduceTensorOp_t,
        x: Tensor,
        y: Tensor,
    ) -> Result<Tensor, CudaError> {
        let how = Descriptor::new(Type::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        let kind = Kind::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
        how.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, kind, &[operator])?;
        how.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[FLOAT.raw()])?;
        how.finalize()?;
        let operation = Descriptor::new(Type::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.link(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&how])?;
        operation.link(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &[&self.tensors[x.0]])?;
        operation.link(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &[&self.tensors[y.0]])?;
        self.finish(how, operation, y)
    }

    /// View of a tensor with other dimensions and strides.
    pub(super) fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<Tensor, CudaError> {
        let operation = Descriptor::new(Type::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.link(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &[&self.tensors[x.0]])?;
        operation.link(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &[&self.tensors[y.0]])?;
        operation.finalize()?;
        self.operations.push(operation);
        Ok(y)
    }

    fn finish(
        &mut self,
        how: Descriptor,
        operation: Descriptor,
        output: Tensor,
    ) -> Result<Tensor, CudaError> {
        operation.finalize()?;
        self.parts.push(how);
        self.operations.push(operation);
        Ok(output)
    }

    /// Chooses an engine for the graph: the first of the library's proposals that supports it.
    pub(super) fn plan(self, cudnn: &Cudnn, name: &'static str) -> Result<Plan, CudaError> {
        let graph = Descriptor::new(Type::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let handle = [cudnn.handle];
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &handle)?;
        let operations: Vec<&Descriptor> = self.operations.iter().collect();
        graph.link(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        graph.finalize()?;
        let heuristic = Descriptor::new(Type::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristic.link(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&graph])?;
        let mode = [sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A];
        heuristic.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Kind::CUDNN_TYPE_HEUR_MODE, &mode)?;
        heuristic.finalize()?;
        let proposals: Vec<Descriptor> = (0..PROPOSALS)
            .map(|_| Descriptor::new(Type::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
            .collect::<Result<_, _>>()?;
        let mut raw: Vec<_> = proposals.iter().map(|proposal| proposal.raw).collect();
        let mut count = 0i64;
        // SAFETY: `raw` has room for as many descriptors as are asked for.
        unsafe {
            sys::cudnnBackendGetAttribute(
                heuristic.raw,
                Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
                Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                PROPOSALS,
                &raw mut count,
                raw.as_mut_ptr().cast(),
            )
        }
        .result()
        .map_err(failed("asking cuDNN for engines"))?;
        let mut last = None;
        for proposal in proposals.iter().take(usize::try_from(count).unwrap_or(0)) {
            let plan = Descriptor::new(Type::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
            plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Kind::CUDNN_TYPE_HANDLE, &handle)?;
            plan.link(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[proposal])?;
            match plan.finalize() {
                Ok(()) => {
                    let mut bytes = 0i64;
                    // SAFETY: one integer is asked for.
                    unsafe {
                        sys::cudnnBackendGetAttribute(
                            plan.raw,
                            Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                            Kind::CUDNN_TYPE_INT64,
                            1,
                            &raw mut count,
                            (&raw mut bytes).cast(),
                        )
                    }
                    .result()
                    .map_err(failed("asking for a workspace's size"))?;
                    let workspace = u64::try_from(bytes).unwrap_or(0);
                    return Ok(Plan { plan, values: self.values, name, workspace });
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| CudaError::Call {
            call: name.to_owned(),
            what: "cuDNN has no engine for it".to_owned(),
        }))
    }
}

/// Engines that the library is asked for.
const PROPOSALS: i64 = 16;
