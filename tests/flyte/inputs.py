"""Run by Flyte's Python: inputs of a task as the file that its container gets. In Flyte 2.12 no public name makes one.

python inputs.py FILE RECIPE DATA OVERRIDES(JSON) [CHECKPOINT]      the inputs of `train`
python inputs.py --error FILE                                       what error.pb holds, as JSON
"""

import asyncio
import json
import sys
from pathlib import Path


def main():
    if sys.argv[1] == "--error":
        from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument

        error = ErrorDocument.FromString(Path(sys.argv[2]).read_bytes()).error
        print(json.dumps({"retried": error.kind == ContainerError.RECOVERABLE, "message": error.message}))
        return
    import flyte
    import windlass_pipeline
    from flyte._internal.runtime import convert
    from flyte.io import Dir

    flyte.init()
    file, recipe, data, overrides, *start_from = sys.argv[1:]
    given = [Path(recipe).read_text(), json.loads(overrides), Dir(path=data)]
    given.append(Dir(path=start_from[0]) if start_from else None)
    made = asyncio.run(convert.convert_from_native_to_inputs(windlass_pipeline.train.native_interface, *given))
    Path(file).write_bytes(made.proto_inputs.SerializeToString())


main()
