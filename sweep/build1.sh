#!/bin/bash
# build1.sh srcroot(csrc) outdir : compiles layer norm's backward and binding from srcroot, links with the other objects
S=$1; O=$2; mkdir -p $O/obj; cd /work/normbwd; . /work/env.sh
I="-I$S -I/work/main/.venv/lib/python3.11/site-packages/torch/include -I/work/main/.venv/lib/python3.11/site-packages/torch/include/torch/csrc/api/include -I/usr/local/cuda-13.0/include"
N="-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__ --expt-relaxed-constexpr --compiler-options -fPIC -O3 -std=c++20 -DTORCH_TARGET_VERSION=0x020a000000000000 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__ -Xcompiler=-fvisibility=hidden --compress-mode=size -gencode=arch=compute_90a,code=sm_90a -Xptxas -v"
for f in bwd bwd_ragged; do nice nvcc $I $N -c $S/layer_norm/$f.cu -o $O/obj/$f.o > $O/obj/$f.log 2>&1 || { tail -20 $O/obj/$f.log; exit 1; }; done
nice g++ $I -fPIC -O3 -std=c++20 -DTORCH_TARGET_VERSION=0x020a000000000000 -fvisibility=hidden -c $S/binding/layer_norm.cpp -o $O/obj/binding.o || exit 1
T=/work/normbwd/build/temp.linux-x86_64-cpython-311
OBJ=$(find $T -name "*.o" | grep -v "layer_norm/bwd\|binding/layer_norm.o")
g++ -shared -o $O/_kernels.so $OBJ $O/obj/*.o -L/work/main/.venv/lib/python3.11/site-packages/torch/lib -L/usr/local/cuda-13.0/lib64 -ltorch_cpu -lcudart_static -lrt -ldl -lpthread -Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,--strip-debug -Wl,--build-id=0x$(python -c "
import runpy;print(runpy.run_path('flash_attn/_build_id.py')['build_id']())") && ls -la $O/_kernels.so; grep -h "spill" $O/obj/*.log | sort | uniq -c
